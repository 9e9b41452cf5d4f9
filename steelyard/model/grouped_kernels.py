"""Triton kernels for the products of experts in fp32 and fp16, where PyTorch's grouped product takes bf16 only.

Rows are sorted by expert. The kernels read the experts' loads on the device, so the host does not wait for them. Blocks
of rows belong to one expert: there are at most `rows / BLOCK + experts` of them, of which those in excess end at once.
`experts.grouped_linear` is the specification.

Tensor suffixes: S rows (slots), X experts, F outputs, D inputs.
"""

# Kernels have no types that mypy could check.
# mypy: disallow-untyped-defs=false, disallow-untyped-decorators=false, disallow-incomplete-defs=false
# mypy: disallow-untyped-calls=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, DEPTH = 64, 32


@torch.library.custom_op("steelyard::grouped_product", mutates_args=())
def product(x_SD: Tensor, weight_XFD: Tensor, counts_X: Tensor) -> Tensor:
    """The product of each row with the matrix of its expert; rows after the counts are not written."""
    rows, depth = x_SD.shape
    experts, columns, _ = weight_XFD.shape
    x_SD, blocks_X = x_SD.contiguous(), (counts_X + (BLOCK - 1)) // BLOCK
    y_SF = x_SD.new_empty(rows, columns)
    _rows[(triton.cdiv(rows, BLOCK) + experts, triton.cdiv(columns, BLOCK))](
        x_SD, weight_XFD, counts_X.cumsum(0), blocks_X.cumsum(0), y_SF, experts, columns, depth, *weight_XFD.stride(),
        triton.next_power_of_2(experts), BLOCK, DEPTH,
    )  # fmt: skip
    return y_SF


@torch.library.custom_op("steelyard::grouped_weight_gradient", mutates_args=())
def weight_gradient(grad_SF: Tensor, x_SD: Tensor, counts_X: Tensor) -> Tensor:
    """The gradient of the matrices; zero for an expert without rows."""
    experts, columns, depth = len(counts_X), grad_SF.shape[1], x_SD.shape[1]
    grad_XFD = x_SD.new_empty(experts, columns, depth)
    _weight_gradient[(experts, triton.cdiv(columns, BLOCK), triton.cdiv(depth, BLOCK))](
        grad_SF.contiguous(), x_SD.contiguous(), counts_X.cumsum(0), grad_XFD, columns, depth, BLOCK, DEPTH
    )
    return grad_XFD


@product.register_fake
def _(x_SD: Tensor, weight_XFD: Tensor, counts_X: Tensor) -> Tensor:
    return x_SD.new_empty(x_SD.shape[0], weight_XFD.shape[1])


@weight_gradient.register_fake
def _(grad_SF: Tensor, x_SD: Tensor, counts_X: Tensor) -> Tensor:
    return x_SD.new_empty(counts_X.shape[0], grad_SF.shape[1], x_SD.shape[1])


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad_SF: Tensor) -> tuple[Tensor, Tensor, None]:
    x_SD, weight_XFD, counts_X = ctx.saved_tensors
    grad_SD = product(grad_SF, weight_XFD.transpose(1, 2), counts_X)
    return grad_SD, weight_gradient(grad_SF, x_SD, counts_X), None


product.register_autograd(_backward, setup_context=_save)


@triton.jit
def _rows(
    x, weight, ends, block_ends, y, experts, columns, depth, of_expert, of_column, of_depth,
    expert_count: tl.constexpr, block: tl.constexpr, depth_at_once: tl.constexpr,
):  # fmt: skip
    """A block of rows of one expert, and a block of columns of its matrix."""
    number = tl.program_id(0)
    index = tl.arange(0, expert_count)
    is_before = tl.load(block_ends + index, index < experts, other=number + 1) <= number
    expert = tl.sum(is_before.to(tl.int32))
    if number < tl.load(block_ends + experts - 1):
        has_before = expert > 0
        begin = tl.load(ends + expert - 1, has_before, other=0)
        first_block = tl.load(block_ends + expert - 1, has_before, other=0)
        row = begin + (number - first_block) * block + tl.arange(0, block)
        column = tl.program_id(1) * block + tl.arange(0, block)
        is_row, is_column = row < tl.load(ends + expert), column < columns
        weight += expert.to(tl.int64) * of_expert
        total = tl.zeros((block, block), tl.float32)
        for first in range(0, depth, depth_at_once):
            place = first + tl.arange(0, depth_at_once)
            is_place = place < depth
            ours = tl.load(x + row[:, None] * depth + place[None, :], is_row[:, None] & is_place[None, :], other=0.0)
            at = weight + column.to(tl.int64)[None, :] * of_column + place.to(tl.int64)[:, None] * of_depth
            theirs = tl.load(at, is_place[:, None] & is_column[None, :], other=0.0)
            total = tl.dot(ours, theirs, total, input_precision="ieee")
        here = is_row[:, None] & is_column[None, :]
        tl.store(y + row[:, None] * columns + column[None, :], total.to(y.dtype.element_ty), here)


@triton.jit
def _weight_gradient(
    grad, x, ends, grad_weight, columns, depth, block: tl.constexpr, rows_at_once: tl.constexpr
):  # fmt: skip
    """A block of an expert's matrix, summed over the expert's rows."""
    expert = tl.program_id(0)
    column = tl.program_id(1) * block + tl.arange(0, block)
    place = tl.program_id(2) * block + tl.arange(0, block)
    is_column, is_place = column < columns, place < depth
    begin, end = tl.load(ends + expert - 1, expert > 0, other=0), tl.load(ends + expert)
    total = tl.zeros((block, block), tl.float32)
    for first in range(begin, end, rows_at_once):
        row = first + tl.arange(0, rows_at_once)
        is_row = row < end
        ours = tl.load(grad + row[:, None] * columns + column[None, :], is_row[:, None] & is_column[None, :], other=0.0)
        theirs = tl.load(x + row[:, None] * depth + place[None, :], is_row[:, None] & is_place[None, :], other=0.0)
        total = tl.dot(tl.trans(ours), theirs, total, input_precision="ieee")
    at = (expert.to(tl.int64) * columns + column[:, None]) * depth + place[None, :]
    tl.store(grad_weight + at, total.to(grad_weight.dtype.element_ty), is_column[:, None] & is_place[None, :])
