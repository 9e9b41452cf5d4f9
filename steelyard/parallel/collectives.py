"""Differentiable collectives along an axis of the mesh.

The backward of each is the collective that its gradient needs: `copy_to_tp` is the identity forward and all-reduces
backward, `all_reduce` is the reverse; `all_gather` forward is `reduce_scatter` backward, and the reverse.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as functional

from steelyard.parallel.mesh import MeshAxis


def copy_to_tp(x: Tensor, axis: MeshAxis) -> Tensor:
    """Return the input; all-reduce its gradient."""
    result: Tensor = _CopyToTp.apply(x, axis.group)  # type: ignore[no-untyped-call]
    return result


def all_reduce(x: Tensor, axis: MeshAxis) -> Tensor:
    """Sum over ranks; the gradient passes unchanged."""
    result: Tensor = _AllReduce.apply(x, axis.group)  # type: ignore[no-untyped-call]
    return result


def all_gather(x: Tensor, dim: int, axis: MeshAxis) -> Tensor:
    """Concatenate the shards of all ranks; reduce-scatter the gradient."""
    result: Tensor = _AllGather.apply(x, dim, axis.group)  # type: ignore[no-untyped-call]
    return result


def reduce_scatter(x: Tensor, dim: int, axis: MeshAxis) -> Tensor:
    """Return this rank's shard of the sum over ranks; all-gather the gradient."""
    result: Tensor = _ReduceScatter.apply(x, dim, axis.group)  # type: ignore[no-untyped-call]
    return result


def _sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return _wait(functional.all_reduce(x, "sum", group))


def _gather(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    return _wait(functional.all_gather_tensor(x.contiguous(), dim, group))


def _scatter(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    return _wait(functional.reduce_scatter_tensor(x.contiguous(), "sum", dim, group))


def _wait(x: Tensor) -> Tensor:
    """Replace an `AsyncCollectiveTensor`, which waits at its first use, by a plain tensor.

    A compiled layer computes a wrong gradient for an `AsyncCollectiveTensor` input (torch 2.13). Waiting here costs
    nothing: the next operation uses the result, and on a GPU only the stream waits.
    """
    result: Tensor = x.wait() if isinstance(x, functional.AsyncCollectiveTensor) else x
    return result


class _CopyToTp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _sum(grad, ctx.group), None


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _sum(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return _gather(x, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _scatter(grad, ctx.dim, ctx.group), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return _scatter(x, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _gather(grad, ctx.dim, ctx.group), None, None
