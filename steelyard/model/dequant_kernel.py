"""NF4 and int8 matrices to 16 or 32 bits as Triton kernels; `steelyard.model.quantization` is the specification.

A program takes a part of one row, so that the only division by a size that the compiler does not know is per program.
The 16 values are read from memory: they fit in one cache line, and the matrix's own reads and writes, 2.5 bytes per
weight for bf16, take longer.
A product and a sum are not fused, which would round differently: kernels that Python launches are compiled without
fusion. torch.compile cannot pass this option, so `mul_rn` is used there, which Triton's interpreter does not know.

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
from triton.language.extra.libdevice import mul_rn

from steelyard.model.quantization import (
    ABSMAX_BLOCK,
    BLOCK,
    INT8_STEP,
    Quantized,
    ShardExtent,
    absmax_values,
    nf4_values,
)

BYTES = 1024  # of codes per program
_BLOCK, _ABSMAX_BLOCK, _INT8_STEP = tl.constexpr(BLOCK), tl.constexpr(ABSMAX_BLOCK), tl.constexpr(INT8_STEP)


def dequantize(shard: Quantized, extent: ShardExtent, dtype: torch.dtype, backward: bool = False) -> Tensor:
    """The weights of a shard, as in `quantization.dequantize`.

    Codes may have any dtype of one byte: the kernels read their bits, since torch.compile would copy a view of another
    dtype. `backward` changes nothing but the kernel's arguments: see `quantized_weight.py`.
    """
    codes, absmax, scale, offset = (tensor if tensor is None else tensor.contiguous() for tensor in shard)
    assert codes is not None
    assert absmax is not None
    weights = torch.empty(extent.rows, extent.columns, dtype=dtype, device=codes.device)
    row = codes.shape[1]
    grid = extent.rows, triton.cdiv(row, BYTES)
    if row == extent.columns:  # int8: a byte per weight
        _int8[grid](codes, absmax, weights, row, backward, BYTES)
        return weights
    double, traced = scale is not None, torch.compiler.is_compiling()
    options = {} if traced else {"enable_fp_fusion": False}
    _nf4[grid](
        codes, absmax, scale if double else absmax, offset if double else absmax, *_tables(codes.device), weights,
        row, absmax.shape[1], extent.first_row, extent.first_column, extent.whole_columns, double, backward, traced,
        BYTES, **options,
    )  # fmt: skip
    return weights


@torch.compiler.assume_constant_result
def _tables(device):
    return nf4_values(device), absmax_values(device)


@triton.jit
def _nf4(
    codes, absmax, scales, offset, values, absmax_values, weights, row_bytes, row_blocks, first_row, first_column,
    whole_columns, double: tl.constexpr, backward: tl.constexpr, traced: tl.constexpr, bytes_: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    start = (first_row + row) * whole_columns + first_column
    byte = part * bytes_ + tl.arange(0, bytes_)
    here = byte < row_bytes
    pair = tl.load(codes + row * row_bytes + byte, here).to(tl.uint8, bitcast=True).to(tl.int32)
    block = (start % _BLOCK).to(tl.int32) + 2 * byte
    block = block // _BLOCK
    largest = tl.load(absmax + row * row_blocks + block, here)
    if double:
        scale = tl.load(scales + (start // _BLOCK + block) // _ABSMAX_BLOCK, here, other=0.0)
        index = largest.to(tl.uint8, bitcast=True).to(tl.int32)
        value = tl.load(absmax_values + index, here)
        largest = (mul_rn(value, scale) if traced else value * scale) + tl.load(offset)
    high = tl.load(values + (pair >> 4), here) * largest
    low = tl.load(values + (pair & 15), here) * largest
    place = 2 * part * bytes_ + tl.arange(0, 2 * bytes_)
    both = tl.interleave(high, low).to(weights.dtype.element_ty)
    tl.store(weights + row * 2 * row_bytes + place, both, place < 2 * row_bytes)


@triton.jit
def _int8(codes, absmax, weights, columns, backward: tl.constexpr, bytes_: tl.constexpr):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = part * bytes_ + tl.arange(0, bytes_)
    here = column < columns
    code = tl.load(codes + row * columns + column, here).to(tl.int8, bitcast=True).to(tl.float32)
    weight = code * tl.load(absmax + row) * _INT8_STEP
    tl.store(weights + row * columns + column, weight.to(weights.dtype.element_ty), here)
