"""Expert parallelism: each rank of the expert axis holds some of the experts of every layer.

The ranks of the axis see different tokens. An all-to-all sends each slot (a token with one of its experts) to the rank
that holds the expert, and another returns the result. Splits depend on the routing, so the host reads them once per
layer; everything else stays on the device.

Tensor suffixes: S slots of this rank, N slots received, D hidden, X experts, R ranks, E experts of a rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from steelyard.model import LanguageModel
from steelyard.model.experts import ExpertLinear, Experts, permuted, sorted_slots
from steelyard.parallel.mesh import MeshAxis
from steelyard.parallel.tensor_parallel import ADAPTER_IN, ADAPTER_OUT, BESIDE_WEIGHT, ShardSpec, shard_param


def split(model: LanguageModel, axis: MeshAxis) -> dict[str, ShardSpec]:
    """Shard the experts of a model over the ranks of an axis, and return the sharded parameters by name."""
    specs: dict[str, ShardSpec] = {}
    for path, module in model.named_modules():
        if isinstance(module, Experts):
            module.exchange = ExpertDispatcher(axis)
        elif isinstance(module, ExpertLinear):
            module.expert_shard = (axis.index, axis.size)
            for parameter in ("weight", *BESIDE_WEIGHT, ADAPTER_IN, ADAPTER_OUT):
                if hasattr(module, parameter):
                    shard_param(module, parameter, 0, f"{path}.{parameter}", axis, specs)
    return specs


class ExpertDispatcher:
    """Computes slots on the ranks that hold their experts."""

    def __init__(self, axis: MeshAxis) -> None:
        self.axis = axis

    @torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator]
    def __call__(self, experts: nn.Module, x_SD: Tensor, counts_X: Tensor) -> Tensor:
        """The output of each slot. Slots are sorted by expert; those after the counts give zeros."""
        ranks, group = self.axis.size, self.axis.group
        sent_RE = counts_X.view(ranks, -1)
        received_RE = torch.empty_like(sent_RE)
        dist.all_to_all_single(received_RE, sent_RE, group=group)
        sends, receives = torch.stack([sent_RE.sum(1), received_RE.sum(1)]).tolist()
        x_ND = all_to_all(x_SD[: sum(sends)], sends, receives, group)
        # They arrive by rank and, from each rank, by expert.
        local_experts = sent_RE.shape[1]
        expert_RE = torch.arange(local_experts, device=x_SD.device).repeat(ranks)
        expert_N = expert_RE.repeat_interleave(received_RE.flatten(), output_size=sum(receives))
        slots = sorted_slots(expert_N, local_experts)
        in_order_ND = permuted(x_ND, slots._replace(order_S=slots.inverse_S, inverse_S=slots.order_S))
        y_ND = permuted(experts(in_order_ND, slots.counts_X), slots)
        y_SD = all_to_all(y_ND, receives, sends, group)
        return torch.cat([y_SD, y_SD.new_zeros(len(x_SD) - len(y_SD), y_SD.shape[1])])


@torch.compiler.disable  # type: ignore[untyped-decorator]
def all_to_all(x: Tensor, sends: list[int], receives: list[int], group: dist.ProcessGroup | None) -> Tensor:
    """Send consecutive rows to each rank, and return the rows of all ranks; the gradient takes the way back.

    It is not compiled: with torch 2.11 the compiled graph keeps its result until the backward pass.
    """
    result: Tensor = _AllToAll.apply(x, sends, receives, group)  # type: ignore[no-untyped-call]
    return result


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sends: list[int], receives: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.splits = sends, receives, group
        return _exchanged(x, sends, receives, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        sends, receives, group = ctx.splits
        return _exchanged(grad, receives, sends, group), None, None, None


def _exchanged(x: Tensor, sends: list[int], receives: list[int], group: dist.ProcessGroup) -> Tensor:
    received = x.new_empty(sum(receives), *x.shape[1:])
    dist.all_to_all_single(received, x.contiguous(), receives, sends, group=group)
    return received
