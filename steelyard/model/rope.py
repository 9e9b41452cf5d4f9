"""Rotary positions: the angles of each position, and the rotation of queries and keys.

Tensor suffixes: B batch, L length, E rotated width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from steelyard.core.recipe.blocks import Rope
from steelyard.core.recipe.rope_scaling import RopeScaling
from steelyard.model.modules import is_inference

Rotation = tuple[Tensor, Tensor]


def rope_cos_sin(rope: Rope, position_ids_BL: Tensor) -> Rotation:
    """Cosine and sine of the angles of each position, shared by all heads, always in fp32."""
    exponents = torch.arange(0, rope.width, 2, dtype=torch.float32, device=position_ids_BL.device) / rope.width
    frequencies = rope.theta**-exponents
    if rope.scaling is not None:
        frequencies = scaled(frequencies, rope.scaling, rope.theta)
    angles_BLE = (position_ids_BL.float()[..., None] * frequencies).repeat(1, 1, 2)
    cosine, sine = angles_BLE.cos()[:, None], angles_BLE.sin()[:, None]
    if rope.scaling is None or rope.scaling.kind != "yarn":
        return cosine, sine
    factor = rope.scaling.attention_factor or max(1.0, 0.1 * math.log(rope.scaling.factor) + 1)
    return factor * cosine, factor * sine


def scaled(frequencies: Tensor, scaling: RopeScaling, theta: float = 10000.0) -> Tensor:
    """Frequencies for a longer context. Low frequencies are divided by the factor; linear scaling divides all."""
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "llama3":
        turns = scaling.original_positions * frequencies / (2 * math.pi)
        width = scaling.high_freq_factor - scaling.low_freq_factor
        unscaled = ((turns - scaling.low_freq_factor) / width).clamp(0, 1)
    else:
        low, high = (_dimension(scaling, turns, 2 * len(frequencies), theta) for turns in _limits(scaling))
        if scaling.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * len(frequencies) - 1)
        ramp = torch.arange(len(frequencies), dtype=torch.float32, device=frequencies.device) - low
        unscaled = 1 - (ramp / (high - low if high != low else 0.001)).clamp(0, 1)
    return frequencies * (unscaled + (1 - unscaled) / scaling.factor)


def _limits(scaling: RopeScaling) -> tuple[float, float]:
    return scaling.beta_fast, scaling.beta_slow


def _dimension(scaling: RopeScaling, turns: float, width: int, theta: float) -> float:
    """The pair of dimensions that turns this often within the original positions."""
    return width * math.log(scaling.original_positions / (turns * 2 * math.pi)) / (2 * math.log(theta))


def apply_rope(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotate the pairs (i, i + half) of each head by the angles of its position. Further dimensions are unchanged."""
    cosine, sine = rotation
    if is_inference(x):
        from steelyard.model.inference_kernels import rotated as rotated_by_kernel

        return rotated_by_kernel(x, cosine, sine)
    rest = x[..., cosine.shape[-1] :]
    turning = x[..., : cosine.shape[-1]].float()
    first, second = turning.chunk(2, dim=-1)
    rotated = (turning * cosine + torch.cat([-second, first], dim=-1) * sine).to(x.dtype)
    return torch.cat([rotated, rest], dim=-1) if rest.shape[-1] else rotated
