"""Data parallelism with four ZeRO stages, all of them based on PyTorch's `fully_shard`.

zero 0   every rank holds everything; gradients are all-reduced once per step
zero 1   optimizer state and fp32 weights are sharded; weights are all-gathered once per step
zero 2   gradients are sharded too: they are reduce-scattered after every micro-batch
zero 3   weights are sharded too: those of a layer are all-gathered when it computes and freed afterwards
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from steelyard.model import LanguageModel
from steelyard.model.experts import Experts
from steelyard.parallel.mesh import Mesh


def materialise(model: LanguageModel, device: torch.device, mesh: Mesh, zero: int) -> None:
    """Allocate and shard a model layer by layer, so that no rank holds more than one unsharded layer."""
    own = mesh.expert.size > 1
    for layer in model.layers.values():
        layer.to_empty(device=device)
        for buffer in layer.buffers():
            buffer.zero_()
        if mesh.sharding.mesh is not None:
            _shard_layer(layer, model.dtype, mesh, zero, own)
    for name, child in model.named_children():
        if name != "layers":
            child.to_empty(device=device)
    model.tie()
    if mesh.sharding.mesh is None:
        if model.embed is not None and model.head is not None and model.embed.weight is model.head.weight:
            # The gradient of the embedding rows is added to the head's gradient without a dense matrix of zeros. Not
            # under FSDP: its gradient has 16 bits, and each addition would be rounded.
            model.embed.sparse = True
    elif next(model.parameters(), None) is not None:
        whole = {parameter for layer in model.layers.values() for parameter in _whole_params(layer, mesh)}
        _shard(model, model.dtype, mesh.sharding.mesh, zero, whole)


def _shard_layer(layer: nn.Module, dtype: torch.dtype, mesh: Mesh, zero: int, own: bool) -> None:
    """Shard a layer; if the expert axis splits its experts, they are sharded over other ranks than the rest."""
    assert mesh.sharding.mesh is not None
    mlp = layer.get_submodule("mlp")
    if own and isinstance(mlp, Experts) and mesh.expert_sharding.mesh is not None:
        _shard(mlp.experts, dtype, mesh.expert_sharding.mesh, zero, set())
    _shard(layer, dtype, mesh.sharding.mesh, zero, _whole_params(layer, mesh))


def _whole_params(layer: nn.Module, mesh: Mesh) -> set[nn.Parameter]:
    """Parameters of a layer that FSDP does not shard: biases that no gradient changes, and experts of one rank."""
    mlp = layer.get_submodule("mlp")
    if not isinstance(mlp, Experts):
        return set()
    whole = set() if mlp.router.balance is None else {mlp.router.balance}
    if mesh.expert.size > 1 and mesh.expert_sharding.mesh is None:
        whole |= set(mlp.experts.parameters())
    return whole


def _shard(module: nn.Module, dtype: torch.dtype, mesh: DeviceMesh, zero: int, whole: set[nn.Parameter]) -> None:
    # Frozen weights already have the compute dtype, and the parameters trained beside them are used in fp32.
    is_frozen = any(not parameter.requires_grad for parameter in module.parameters() if parameter not in whole)
    param_dtype = None if is_frozen or dtype == torch.float32 else dtype
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    sharded = fully_shard(
        module, mesh=mesh, mp_policy=policy, reshard_after_forward=zero == 3, ignored_params=whole or None
    )
    # The loss is already weighted by tokens, so gradients are summed, not averaged.
    sharded.set_gradient_divide_factor(1.0)
    sharded.set_force_sum_reduction_for_comms(True)


def before_micro_batch(model: LanguageModel, zero: int, is_last: bool) -> None:
    """Set whether the next backward pass synchronizes gradients and reshards weights."""
    if isinstance(model, FSDPModule):
        model.set_is_last_backward(is_last)
        model.set_requires_gradient_sync(is_last or zero >= 2)
        model.set_reshard_after_backward(is_last or zero == 3)
