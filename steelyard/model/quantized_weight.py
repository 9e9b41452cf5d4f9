"""A frozen matrix in 4 or 8 bits, in place of the `weight` of a linear module.

A product dequantizes the matrix to the dtype of its input, multiplies and drops the copy; the backward pass does the
same again. So nothing is kept between the passes but the codes. The two dequantizations differ in an argument, or
torch.compile would compute one for both and keep the 16-bit matrix. On a GPU torch.compile sees the kernel and launches
it from the code that it generates, which costs much less than a launch from Python.

Codes are parameters, so that FSDP can shard them. Before torch 2.13 it supports only floating-point parameters, so the
bytes are stored under a dtype of that kind.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from steelyard.model.modules import Linear
from steelyard.model.quantization import ABSMAX_BLOCK, BLOCK, Quantized, ShardExtent, dequantize

BYTE = torch.float8_e4m3fn
TENSORS = 4  # of `QuantizedWeight.arguments`


class QuantizedWeight(nn.Module):
    """A quantized matrix, or a shard of it. Its parameters are frozen, and named like the fields of `Quantized`."""

    scale: nn.Parameter | None
    offset: nn.Parameter | None

    def __init__(
        self, extent: ShardExtent, whole_rows: int, precision: str, double: bool, device: torch.device
    ) -> None:
        super().__init__()
        self.extent, self.whole_rows, self.precision, self.double_quant = extent, whole_rows, precision, double

        def frozen(dtype: torch.dtype, *size: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(size, dtype=dtype, device=device), requires_grad=False)

        self.bits = 8 if precision == "int8" else 4
        self.codes = frozen(BYTE, extent.rows, extent.columns * self.bits // 8)
        blocks_of_row = 1 if precision == "int8" else extent.blocks
        self.absmax = frozen(BYTE if double else torch.float32, extent.rows, blocks_of_row)
        blocks = -(-whole_rows * extent.whole_columns // BLOCK)
        self.scale = frozen(torch.float32, -(-blocks // ABSMAX_BLOCK)) if double else None
        self.offset = frozen(torch.float32, 1) if double else None

    @classmethod
    def like(cls, weight: Tensor, precision: str, double: bool) -> QuantizedWeight:
        """An empty quantized matrix of the size of a whole matrix."""
        rows, columns = weight.shape
        return cls(ShardExtent(0, 0, rows, columns, columns), rows, precision, double, weight.device)

    @property
    def shape(self) -> torch.Size:
        """Rows and columns of the shard."""
        return torch.Size((self.extent.rows, self.extent.columns))

    def shard(self, dim: int, index: int, pieces: int) -> QuantizedWeight:
        """An empty shard: one of `pieces` along a dimension."""
        of = self.extent
        rows, columns = (of.rows // pieces, of.columns) if dim == 0 else (of.rows, of.columns // pieces)
        first = (index * rows, 0) if dim == 0 else (0, index * columns)
        extent = ShardExtent(*first, rows, columns, of.whole_columns)
        return QuantizedWeight(extent, self.whole_rows, self.precision, self.double_quant, self.codes.device)

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """The matrix as a tensor."""
        return _weight(dtype, False, *self.arguments())

    def arguments(self) -> tuple[Any, ...]:
        """The arguments that the operators take."""
        of = self.extent
        place = self.bits, of.first_row, of.first_column, of.whole_columns
        return self.codes, self.absmax, self.scale, self.offset, *place


def quantize_layers(layers: nn.Module, precision: str, double: bool) -> None:
    """Replace the weight of each linear module by an empty quantized one."""
    for module in layers.modules():
        if isinstance(module, Linear):
            weight = QuantizedWeight.like(module.weight, precision, double)
            del module.weight
            module.weight = weight  # type: ignore[assignment]
            module.product = product  # type: ignore[assignment]


def product(x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    """x @ weight.T + bias."""
    y: Tensor = _Product.apply(x, *weight.arguments())  # type: ignore[no-untyped-call]
    return y if bias is None else y + bias.to(y.dtype)


class _Product(torch.autograd.Function):
    """x @ weight.T, with a gradient only for x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *arguments: Any) -> Tensor:
        ctx.save_for_backward(*arguments[:TENSORS])
        ctx.place = arguments[TENSORS:]
        return F.linear(x, _weight(x.dtype, False, *arguments))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        weight = _weight(gradient.dtype, True, *ctx.saved_tensors, *ctx.place)
        return gradient @ weight, *[None] * (TENSORS + len(ctx.place))


def _weight(
    dtype: torch.dtype, backward: bool, codes: Tensor, absmax: Tensor, scale: Tensor | None, offset: Tensor | None,
    bits: int, first_row: int, first_column: int, whole_columns: int,
) -> Tensor:  # fmt: skip
    if codes.is_cuda:
        from steelyard.model import dequant_kernel

        extent = ShardExtent(first_row, first_column, codes.shape[0], codes.shape[1] * 8 // bits, whole_columns)
        return dequant_kernel.dequantize(Quantized(codes, absmax, scale, offset), extent, dtype, backward)
    place = bits, first_row, first_column, whole_columns
    weight: Tensor = _dequantize(codes, absmax, scale, offset, *place, dtype, backward)
    return weight


@torch.library.custom_op("steelyard::dequantize", mutates_args=())
def _dequantize(
    codes: Tensor, absmax: Tensor, scale: Tensor | None, offset: Tensor | None,
    bits: int, first_row: int, first_column: int, whole_columns: int, dtype: torch.dtype, backward: bool,
) -> Tensor:  # fmt: skip
    extent = ShardExtent(first_row, first_column, codes.shape[0], codes.shape[1] * 8 // bits, whole_columns)
    codes = codes.view(torch.int8 if bits == 8 else torch.uint8)
    shard = Quantized(codes, absmax.view(torch.uint8) if absmax.dtype == BYTE else absmax, scale, offset)
    return dequantize(shard, extent, dtype)


@_dequantize.register_fake
def _(codes: Tensor, absmax: Tensor, scale: Any, offset: Any, bits: int, *rest: Any) -> Tensor:
    return codes.new_empty(codes.shape[0], codes.shape[1] * 8 // bits, dtype=rest[-2])
