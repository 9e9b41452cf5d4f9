"""8-bit values with one fp32 scale for each row of a matrix.

The scale maps the largest absolute value of a row to the largest number of the format: 127 of int8, 448 of fp8 (e4m3).
A weight is its value times the scale of its row.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

ValueFormat = Literal["fp8", "int8"]
DTYPES: dict[ValueFormat, torch.dtype] = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
LARGEST: dict[ValueFormat, float] = {"fp8": 448.0, "int8": 127.0}


def quantized(weights: Tensor, kind: ValueFormat) -> tuple[Tensor, Tensor]:
    """The 8-bit values (..., out, in) and the scales (..., out) of weights."""
    scales = scales_of(weights, kind)
    return nearest(weights.float() / scales[..., None], kind), scales


def scales_of(weights: Tensor, kind: ValueFormat) -> Tensor:
    """The scale of each row."""
    # A row of zeros has the smallest scale, not zero, which would divide by zero.
    return (weights.float().abs().amax(-1) / LARGEST[kind]).clamp(min=torch.finfo(torch.float32).tiny)


def nearest(scaled: Tensor, kind: ValueFormat) -> Tensor:
    """The nearest 8-bit values of weights that were divided by their scales."""
    scaled = scaled.clamp(-LARGEST[kind], LARGEST[kind])
    return (scaled.round() if kind == "int8" else scaled).to(DTYPES[kind])


def dequantized(values: Tensor, scales: Tensor) -> Tensor:
    """The weights in fp32."""
    return values.float() * scales[..., None]
