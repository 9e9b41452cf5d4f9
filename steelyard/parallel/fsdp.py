"""Data parallelism with four ZeRO stages, all of them based on PyTorch's `fully_shard`.

zero 0   every rank holds everything; gradients are all-reduced once per step
zero 1   optimizer state and fp32 weights are sharded; weights are all-gathered once per step
zero 2   gradients are sharded too: they are reduce-scattered after every micro-batch
zero 3   weights are sharded too: those of a layer are all-gathered when it computes and freed afterwards
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from steelyard.model import LanguageModel
from steelyard.model.experts import Experts
from steelyard.parallel.mesh import Mesh


def materialize(
    model: LanguageModel, device: torch.device, mesh: Mesh, zero: int, gradients: torch.dtype = torch.float32
) -> None:
    """Allocate and shard a model layer by layer, so that no rank holds more than one unsharded layer.

    `gradients` is the dtype in which gradients are accumulated and reduced.
    """
    own = mesh.expert.size > 1
    for layer in model.layers.values():
        layer.to_empty(device=device)
        for buffer in layer.buffers():
            buffer.zero_()
        if mesh.fsdp.mesh is not None:
            _shard_layer(layer, model.dtype, mesh, zero, own, gradients)
    for name, child in model.named_children():
        if name != "layers":
            child.to_empty(device=device)
    model.tie()
    if mesh.fsdp.mesh is None:
        if model.embed is not None and model.head is not None and model.embed.weight is model.head.weight:
            # The gradient of the embedding rows is added to the head's gradient without a dense matrix of zeros. Not
            # to a gradient in 16 bits, as under FSDP: each addition would be rounded.
            model.embed.sparse = gradients == torch.float32
    elif next(model.parameters(), None) is not None:
        whole = {parameter for layer in model.layers.values() for parameter in _whole_params(layer, mesh)}
        _shard(model, model.dtype, mesh.fsdp.mesh, zero, whole, gradients)
    if gradients != torch.float32:
        _store_gradients(model, gradients)


def _store_gradients(model: LanguageModel, dtype: torch.dtype) -> None:
    """Keep gradients in another dtype than the weights."""

    def cast(parameter: Tensor) -> None:
        gradient = parameter.grad
        if gradient is not None and gradient.dtype != dtype:
            parameter.grad = gradient.to(dtype)

    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            # FSDP casts a reduced gradient to the dtype of the weights, then calls this hook.
            parameter.grad_dtype = None
            parameter.register_post_accumulate_grad_hook(cast)  # type: ignore[no-untyped-call]
        elif parameter.requires_grad:
            parameter.grad_dtype = dtype


def _shard_layer(
    layer: nn.Module, dtype: torch.dtype, mesh: Mesh, zero: int, own: bool, gradients: torch.dtype
) -> None:
    """Shard a layer; if the expert axis splits its experts, they are sharded over other ranks than the rest."""
    assert mesh.fsdp.mesh is not None
    mlp = layer.get_submodule("mlp")
    if own and isinstance(mlp, Experts) and mesh.expert_fsdp.mesh is not None:
        _shard(mlp.experts, dtype, mesh.expert_fsdp.mesh, zero, set(), gradients)
    _shard(layer, dtype, mesh.fsdp.mesh, zero, _whole_params(layer, mesh), gradients)


def _whole_params(layer: nn.Module, mesh: Mesh) -> set[nn.Parameter]:
    """Parameters of a layer that FSDP does not shard: biases that no gradient changes, and experts of one rank."""
    mlp = layer.get_submodule("mlp")
    if not isinstance(mlp, Experts):
        return set()
    whole = set() if mlp.router.balance is None else {mlp.router.balance}
    if mesh.expert.size > 1 and mesh.expert_fsdp.mesh is None:
        whole |= set(mlp.experts.parameters())
    return whole


def _shard(
    module: nn.Module,
    dtype: torch.dtype,
    mesh: DeviceMesh,
    zero: int,
    whole: set[nn.Parameter],
    gradients: torch.dtype,
) -> None:
    # Frozen weights already have the compute dtype, and the parameters trained beside them are used in fp32.
    is_frozen = any(not parameter.requires_grad for parameter in module.parameters() if parameter not in whole)
    param_dtype = None if is_frozen or dtype == torch.float32 else dtype
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=gradients, cast_forward_inputs=False)
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
