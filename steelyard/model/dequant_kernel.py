"""NF4 and int8 matrices to 16 or 32 bits as Triton kernels; `steelyard.model.quantization` is the specification.

A program takes a part of one row, so that the only division by a size that the compiler does not know is per program.
The 16 values are read from memory: they fit in one cache line, and the matrix's own reads and writes, 2.5 bytes per
weight for bf16, take longer. Products and sums are not fused, which would round differently.

This module is imported only on machines with a GPU, since others may have no Triton.
"""

# Kernels have no types that mypy could check.
# mypy: disallow-untyped-defs=false, disallow-untyped-decorators=false, disallow-incomplete-defs=false
# mypy: disallow-untyped-calls=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from steelyard.model.quantization import (
    ABSMAX_BLOCK,
    BLOCK,
    INT8_STEP,
    Quantized,
    ShardExtent,
    absmax_values,
    nf4_values,
)

BYTES, WARPS = 1024, 4  # of codes per program, and its warps
_BLOCK, _ABSMAX_BLOCK, _INT8_STEP = tl.constexpr(BLOCK), tl.constexpr(ABSMAX_BLOCK), tl.constexpr(INT8_STEP)


def dequantize(shard: Quantized, extent: ShardExtent, dtype: torch.dtype) -> Tensor:
    """The weights of a shard, as in `quantization.dequantize`."""
    codes, absmax, scale, offset = (tensor if tensor is None else tensor.contiguous() for tensor in shard)
    assert codes is not None
    assert absmax is not None
    weights = torch.empty(extent.rows, extent.columns, dtype=dtype, device=codes.device)
    row = codes.shape[1]
    grid = extent.rows, triton.cdiv(row, BYTES)
    if codes.dtype == torch.int8:
        _int8[grid](codes, absmax, weights, row, BYTES, num_warps=WARPS)
        return weights
    double = scale is not None
    _nf4[grid](
        codes, absmax, scale if double else absmax, offset if double else absmax, nf4_values(codes.device),
        absmax_values(codes.device), weights, row, absmax.shape[1], extent.first_row, extent.first_column,
        extent.whole_columns, double, BYTES, num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    return weights


@triton.jit
def _nf4(
    codes, absmax, scales, offset, values, absmax_values, weights, row_bytes, row_blocks, first_row, first_column,
    whole_columns, double: tl.constexpr, bytes_: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    start = (first_row + row) * whole_columns + first_column
    byte = part * bytes_ + tl.arange(0, bytes_)
    here = byte < row_bytes
    pair = tl.load(codes + row * row_bytes + byte, here, other=0).to(tl.int32)
    block = (start % _BLOCK).to(tl.int32) + 2 * byte
    block = block // _BLOCK
    largest = tl.load(absmax + row * row_blocks + block, here, other=0)
    if double:
        scale = tl.load(scales + (start // _BLOCK + block) // _ABSMAX_BLOCK, here, other=0.0)
        largest = tl.load(absmax_values + largest.to(tl.int32)) * scale + tl.load(offset)
    high = tl.load(values + (pair >> 4)) * largest
    low = tl.load(values + (pair & 15)) * largest
    place = 2 * part * bytes_ + tl.arange(0, 2 * bytes_)
    both = tl.interleave(high, low).to(weights.dtype.element_ty)
    tl.store(weights + row * 2 * row_bytes + place, both, place < 2 * row_bytes)


@triton.jit
def _int8(codes, absmax, weights, columns, bytes_: tl.constexpr):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = part * bytes_ + tl.arange(0, bytes_)
    here = column < columns
    code = tl.load(codes + row * columns + column, here, other=0).to(tl.float32)
    weight = code * tl.load(absmax + row) * _INT8_STEP
    tl.store(weights + row * columns + column, weight.to(weights.dtype.element_ty), here)
