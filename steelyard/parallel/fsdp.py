"""Data parallelism in four degrees, all of them PyTorch's `fully_shard`.

zero 0   every rank holds everything; gradients are summed once per step
zero 1   optimizer state and fp32 weights are shared out; weights are gathered once per step
zero 2   gradients too: they are summed and shared out after every micro-batch
zero 3   weights too: a layer's are gathered when it computes and given away again
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from steelyard.model import LanguageModel


def materialise(model: LanguageModel, device: torch.device, mesh: DeviceMesh | None, zero: int) -> None:
    """Give a model memory and share it out: layer by layer, so that no rank ever holds more than one of them whole."""
    for layer in model.layers.values():
        layer.to_empty(device=device)
        if mesh is not None:
            _shard(layer, model.dtype, mesh, zero)
    for name, child in model.named_children():
        if name != "layers":
            child.to_empty(device=device)
    model.tie()
    if mesh is None:
        if model.embed is not None and model.head is not None and model.embed.weight is model.head.weight:
            # Rows looked up are added to the head's gradient, instead of a matrix that is zero elsewhere. FSDP's is of
            # 16 bits, to which each would be rounded.
            model.embed.sparse = True
    elif next(model.parameters(), None) is not None:
        _shard(model, model.dtype, mesh, zero)


def _shard(module: nn.Module, dtype: torch.dtype, mesh: DeviceMesh, zero: int) -> None:
    # Frozen weights lie in the dtype of products already, and what is learned beside them is used in fp32.
    is_frozen = any(not parameter.requires_grad for parameter in module.parameters())
    working = None if is_frozen or dtype == torch.float32 else dtype
    policy = MixedPrecisionPolicy(param_dtype=working, reduce_dtype=torch.float32, cast_forward_inputs=False)
    sharded = fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=zero == 3)
    # Losses are weighed by their tokens before; gradients are summed, not averaged.
    sharded.set_gradient_divide_factor(1.0)
    sharded.set_force_sum_reduction_for_comms(True)


def before_micro_batch(model: LanguageModel, zero: int, is_last: bool) -> None:
    """Say what the next backward pass is to do with gradients and weights."""
    if isinstance(model, FSDPModule):
        model.set_is_last_backward(is_last)
        model.set_requires_gradient_sync(is_last or zero >= 2)
        model.set_reshard_after_backward(is_last or zero == 3)
