"""NF4 and int8 matrices as bitsandbytes defines them; the specification of `dequant_kernel.py`.

nf4    The matrix is one row of numbers in blocks of 64. A block is divided by its largest magnitude, and each number
       becomes the index of the nearest of 16 values: the quantiles of a normal distribution. Two numbers share a byte,
       the first in the high half.
       Double quantization stores these magnitudes in 8 bits as well: less their mean, in blocks of 256, as indices of
       256 values whose spacing grows with their magnitude.
int8   A row is divided by its largest magnitude, times 127, and rounded.

A rank may hold some rows and columns of a matrix. Blocks are always those of the whole matrix, so a weight has the same
value for every layout. A block may begin in one row and end in the next, and a shard may begin inside a block:
therefore `absmax` is stored per row, with every block that the row has a part of.

    bits per weight: nf4 4.5, with double quantization 4.13; int8 8 and 32 per row
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

BLOCK, ABSMAX_BLOCK = 64, 256
# The published values: quantiles of the normal distribution, scaled to [-1, 1], with an exact zero.
NF4_VALUES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
SMALLEST = 1e-38  # Blocks of zeros are divided by this.
INT8_STEP = 1 / 127
EXPONENTS = 7  # of the 8-bit values of double quantization


@dataclass(frozen=True)
class ShardExtent:
    """The rows and columns of a shard, and the columns of the whole matrix."""

    first_row: int
    first_column: int
    rows: int
    columns: int
    whole_columns: int

    @property
    def blocks(self) -> int:
        """The largest number of blocks that a row of the shard has a part of."""
        step = math.gcd(self.whole_columns, BLOCK)  # Rows begin at multiples of this in a block.
        latest = BLOCK - step + self.first_column % step
        return (latest + self.columns - 1) // BLOCK + 1

    def block_numbers(self, device: torch.device) -> Tensor:
        """The number of the first block of each row, in the whole matrix."""
        rows = torch.arange(self.first_row, self.first_row + self.rows, device=device)
        return (rows * self.whole_columns + self.first_column) // BLOCK

    def block_indices(self, device: torch.device) -> Tensor:
        """For each weight of the shard, the block of its row."""
        rows = torch.arange(self.first_row, self.first_row + self.rows, device=device)
        shift = (rows * self.whole_columns + self.first_column) % BLOCK
        return (shift[:, None] + torch.arange(self.columns, device=device)) // BLOCK


class Quantized(NamedTuple):
    """The numbers of a quantized matrix or of a shard of it. `scale` and `offset` exist with double quantization."""

    codes: Tensor
    """uint8, two weights per byte, for nf4; int8 for int8."""
    absmax: Tensor
    """Rows x blocks, fp32, or uint8 with double quantization; one column for int8."""
    scale: Tensor | None = None
    offset: Tensor | None = None


@lru_cache(maxsize=16)
def nf4_values(device: torch.device) -> Tensor:
    """The 16 values in fp32."""
    return torch.tensor(NF4_VALUES, device=device)


@lru_cache(maxsize=16)
def absmax_values(device: torch.device) -> Tensor:
    """The 256 values of double quantization, ascending: signed fractions times powers of ten, and 0 and 1.

    The fractions of exponent e are the middles of 2^e equal intervals of [0.1, 1].
    """
    values = [0.0, 1.0]
    for exponent in range(EXPONENTS):
        edges = torch.linspace(0.1, 1, 2**exponent + 1, dtype=torch.float32, device="cpu")
        middles = (edges[:-1] + edges[1:]) / 2.0
        scaled = (10 ** (exponent - EXPONENTS + 1) * middles).tolist()
        values += scaled + [-value for value in scaled]
    return torch.tensor(sorted(values), dtype=torch.float32).to(device)


def quantize(weight: Tensor, precision: str, double: bool = False) -> Quantized:
    """Quantize a whole matrix."""
    if precision == "int8":
        return _quantize_int8(weight)
    codes, absmax = _quantize_blocks(weight.flatten(), nf4_values(weight.device), BLOCK)
    if codes.numel() % 2:
        codes = F.pad(codes, (0, 1))
    packed = codes[0::2] << 4 | codes[1::2]
    if not double:
        return Quantized(packed, absmax)
    offset = absmax.mean()
    absmax, scale = _quantize_blocks(absmax - offset, absmax_values(weight.device), ABSMAX_BLOCK)
    return Quantized(packed, absmax, scale, offset[None])


def _quantize_blocks(numbers: Tensor, values: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """The index of the value nearest to each number over the largest magnitude of its block, and these magnitudes."""
    count = len(numbers)
    blocks = F.pad(numbers.float(), (0, -count % block)).view(-1, block)
    absmax = blocks.abs().amax(dim=1)
    scaled = (blocks * absmax.clamp(min=SMALLEST).reciprocal()[:, None]).clamp_(-1, 1)
    middles = (values[:-1] + values[1:]) / 2
    return torch.bucketize(scaled.flatten()[:count], middles, out_int32=True).to(torch.uint8), absmax


def _quantize_int8(weight: Tensor) -> Quantized:
    absmax = weight.float().abs().amax(dim=1, keepdim=True)
    factor = torch.where(absmax > 128 * SMALLEST, 127 / absmax, 0.0)
    return Quantized((weight.float() * factor).round_().to(torch.int8), absmax)


def shard_of(whole: Quantized, extent: ShardExtent) -> Quantized:
    """The shard of a whole quantized matrix, with `absmax` per row."""
    rows = slice(extent.first_row, extent.first_row + extent.rows)
    if whole.codes.dtype == torch.int8:
        columns = slice(extent.first_column, extent.first_column + extent.columns)
        return Quantized(whole.codes[rows, columns], whole.absmax[rows])
    columns = slice(extent.first_column // 2, (extent.first_column + extent.columns) // 2)
    numbers = extent.block_numbers(whole.absmax.device)[:, None]
    numbers = numbers + torch.arange(extent.blocks, device=numbers.device)
    absmax = whole.absmax[numbers.clamp(max=len(whole.absmax) - 1)]
    codes = whole.codes.view(-1, extent.whole_columns // 2)[rows, columns]
    return Quantized(codes, absmax, whole.scale, whole.offset)


def dequantize(shard: Quantized, extent: ShardExtent, dtype: torch.dtype) -> Tensor:
    """The weights of a shard, computed in fp32 and rounded to `dtype`."""
    codes, absmax, scale, offset = shard
    if codes.dtype == torch.int8:
        return (codes.float() * absmax * INT8_STEP).to(dtype)
    device = codes.device
    if scale is not None and offset is not None:
        numbers = extent.block_numbers(device)[:, None] + torch.arange(extent.blocks, device=device)
        scales = scale[(numbers // ABSMAX_BLOCK).clamp(max=len(scale) - 1)]
        absmax = absmax_values(device)[absmax.int()] * scales + offset
    indices = torch.stack([codes >> 4, codes & 15], dim=-1).flatten(1).int()
    return (nf4_values(device)[indices] * absmax.gather(1, extent.block_indices(device))).to(dtype)
