"""Optimizer state in 16 or 8 bits, for AdamW: how numbers are stored, rounded and read. Plain torch, the definition.

bf16   both moments in bfloat16.
int8   one byte per number, and an fp32 scale for every 256 consecutive numbers of a shard: the largest absolute value.
       First moment: sign(k) (k / 127)^2 scale, with k from -127 to 127. Second moment: (k / 255)^4 scale, with k from 1
       to 255, never 0: a second moment of 0 beside a first moment that is not 0 would be a huge step.

Rounding is stochastic and unbiased, because a moment moves by less than half a step of its code most of the time. The
noise is a hash of the parameter's name, the step and the element's number, so that replicas round alike and a resumed
run repeats it. Rounding to nearest (`noise` None) reproduces the codes of numbers that were read from codes.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 256
NOISE_BITS = 16
MASK = 0xFFFFFFFF


def noise_of(seed: int, step: Tensor, first: int, size: int) -> tuple[Tensor, Tensor]:
    """Two numbers of 16 bits for each of `size` elements from number `first` on."""
    index = torch.arange(first, first + size, dtype=torch.int64, device=step.device)
    x = (index * 0x9E3779B1 + step.to(torch.int64) * 0x85EBCA6B + seed) & MASK
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & MASK
    x = ((x ^ (x >> 15)) * 0xD35A2D97) & MASK
    x ^= x >> 15
    return x & 0xFFFF, x >> 16


def to_bf16(values: Tensor, noise: Tensor | None) -> Tensor:
    """Round fp32 numbers to bfloat16."""
    if noise is None:
        return values.bfloat16()
    bits = values.view(torch.int32).to(torch.int64) & MASK
    bits = (bits + noise) & 0xFFFF0000
    return torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32).view(torch.float32).bfloat16()


def to_int8(values: Tensor, noise: Tensor | None, power: int, largest: int) -> tuple[Tensor, Tensor]:
    """Codes of the absolute values of flat fp32 numbers, and the scale of each block."""
    padded = torch.nn.functional.pad(values.abs(), (0, -len(values) % BLOCK)).view(-1, BLOCK)
    scales = padded.amax(1)
    ratio = (padded / scales.clamp(min=1e-30)[:, None]).flatten()[: len(values)].clamp(max=1.0)
    exact = largest * ratio ** (1 / power)
    if noise is None:
        return exact.round(), scales
    lower = exact.floor()
    low, high, value = (lower / largest) ** power, ((lower + 1) / largest) ** power, ratio
    share = (value - low) / (high - low)
    return torch.clamp(lower + (share * (1 << NOISE_BITS) > noise), max=largest), scales


def from_int8(codes: Tensor, scales: Tensor, power: int, largest: int) -> Tensor:
    """Absolute values of flat codes."""
    each = scales.repeat_interleave(BLOCK)[: len(codes)]
    return (codes.abs().float() / largest) ** power * each


def read(state: dict[str, Tensor], kind: str) -> tuple[Tensor, Tensor]:
    """Both moments, flat, in fp32."""
    first, second = state["exp_avg"].view(-1), state["exp_avg_sq"].view(-1)
    if kind == "bf16":
        return first.float(), second.float()
    size = from_int8(first, state["exp_avg_scale"], 2, 127)
    return torch.where(first < 0, -size, size), from_int8(second, state["exp_avg_sq_scale"], 4, 255)


def write(
    state: dict[str, Tensor], kind: str, first: Tensor, second: Tensor, noise: tuple[Tensor, Tensor] | None
) -> None:
    """Store both moments, flat, in fp32."""
    one, other = (None, None) if noise is None else noise
    if kind == "bf16":
        state["exp_avg"].view(-1).copy_(to_bf16(first, one))
        state["exp_avg_sq"].view(-1).copy_(to_bf16(second, other))
        return
    codes, scales = to_int8(first, one, 2, 127)
    state["exp_avg"].view(-1).copy_(torch.where(first < 0, -codes, codes))
    state["exp_avg_scale"].copy_(scales)
    codes, scales = to_int8(second, other, 4, 255)
    state["exp_avg_sq"].view(-1).copy_(torch.where(second > 0, codes.clamp(min=1), codes))
    state["exp_avg_sq_scale"].copy_(scales)


def empty(parameter: Tensor, kind: str) -> dict[str, Tensor]:
    """The state of a parameter before its first step."""
    state = {"step": torch.zeros((), dtype=torch.float32, device=parameter.device)}
    dtypes = (torch.bfloat16, torch.bfloat16) if kind == "bf16" else (torch.int8, torch.uint8)
    for name, dtype in zip(("exp_avg", "exp_avg_sq"), dtypes, strict=True):
        state[name] = torch.zeros_like(parameter, dtype=dtype)
        if kind == "int8":
            state[f"{name}_scale"] = torch.zeros(-(-parameter.numel() // BLOCK), device=parameter.device)
    return state
