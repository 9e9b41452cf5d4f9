"""Exchanges along an axis of the mesh that gradients can pass through.

Each comes with the exchange its gradient needs: what is copied to all ranks forward is summed backward, what is
gathered forward is scattered backward, and the reverse.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import (
    AsyncCollectiveTensor,
    all_gather_tensor,
    all_reduce,
    reduce_scatter_tensor,
)

from steelyard.parallel.mesh import Axis


def copied(x: Tensor, axis: Axis) -> Tensor:
    """The same on every rank; gradients are summed."""
    result: Tensor = _Copied.apply(x, axis.group)  # type: ignore[no-untyped-call]
    return result


def summed(x: Tensor, axis: Axis) -> Tensor:
    """The sum over ranks; every rank has the same gradient."""
    result: Tensor = _Summed.apply(x, axis.group)  # type: ignore[no-untyped-call]
    return result


def gathered(x: Tensor, dim: int, axis: Axis) -> Tensor:
    """The parts of all ranks, one behind the other; gradients are summed and scattered."""
    result: Tensor = _Gathered.apply(x, dim, axis.group)  # type: ignore[no-untyped-call]
    return result


def scattered(x: Tensor, dim: int, axis: Axis) -> Tensor:
    """This rank's part of the sum over ranks; gradients are gathered."""
    result: Tensor = _Scattered.apply(x, dim, axis.group)  # type: ignore[no-untyped-call]
    return result


def _sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return _waited_for(all_reduce(x, "sum", group))


def _gather(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    return _waited_for(all_gather_tensor(x.contiguous(), dim, group))


def _scatter(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    return _waited_for(reduce_scatter_tensor(x.contiguous(), "sum", dim, group))


def _waited_for(x: Tensor) -> Tensor:
    """A plain tensor in place of the one that waits at its first use.

    A compiled layer that takes in such a tensor gives a wrong gradient for it (torch 2.13). Waiting here costs nothing:
    what comes next uses the result, and on a GPU only its stream waits.
    """
    result: Tensor = x.wait() if isinstance(x, AsyncCollectiveTensor) else x
    return result


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _sum(grad, ctx.group), None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _sum(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return _gather(x, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _scatter(grad, ctx.dim, ctx.group), None, None


class _Scattered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return _scatter(x, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _gather(grad, ctx.dim, ctx.group), None, None
