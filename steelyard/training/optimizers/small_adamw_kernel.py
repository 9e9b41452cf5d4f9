"""AdamW with state in 16 or 8 bits as a Triton kernel. `small_adamw.plain_update` is the specification.

This module is imported only on machines with a GPU, since others may have no Triton.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

ROWS, BLOCK = 4, 256  # blocks of state_codes.BLOCK numbers in a program


def update(
    parameter: Tensor,
    gradient: Tensor,
    state: dict[str, Tensor],
    kind: str,
    grad_scale: Tensor,
    found_inf: Tensor,
    numbers: tuple[int, int],
    options: tuple[float, tuple[float, float], float, float],
) -> None:
    """Update one parameter; the caller increments `state["step"]`."""
    rate, betas, eps, decay = options
    size = parameter.numel()
    logs = [math.log(beta) if beta else -1e30 for beta in betas]
    first, second = state["exp_avg"], state["exp_avg_sq"]
    is_int8 = kind == "int8"
    scales = (state["exp_avg_scale"], state["exp_avg_sq_scale"]) if is_int8 else (first, second)
    _kernel[(-(-size // (ROWS * BLOCK)),)](
        parameter, gradient, first, second, *scales, state["step"], grad_scale, found_inf, size, *numbers,
        rate, *betas, *logs, eps, 1 - rate * decay, is_int8, ROWS, BLOCK,
    )  # fmt: skip


@triton.jit
def _to_bf16(values, noise):  # type: ignore[no-untyped-def]
    bits = values.to(tl.uint32, bitcast=True) + noise
    return (bits & 0xFFFF0000).to(tl.float32, bitcast=True).to(tl.bfloat16)


@triton.jit
def _fourth(x):  # type: ignore[no-untyped-def]
    return x * x * x * x


@triton.jit(do_not_specialize=["first_number", "seed", "rate", "kept"])  # type: ignore[untyped-decorator]
def _kernel(  # type: ignore[no-untyped-def]
    parameters, gradients, averages, squares, average_scales, square_scales, step, grad_scale, found_inf, size,
    seed, first_number, rate, beta1, beta2, log_beta1, log_beta2, eps, kept,
    is_int8: tl.constexpr, rows: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    if tl.load(found_inf) == 0:
        row = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
        at = row[:, None] * block + tl.arange(0, block)[None, :]
        mask, row_mask = at < size, row * block < size
        count = tl.load(step) + 1
        gradient = tl.load(gradients + at, mask=mask, other=0.0).to(tl.float32) / tl.load(grad_scale)
        if is_int8:
            code = tl.load(averages + at, mask=mask, other=0).to(tl.float32)
            part = code / 127
            average = part * tl.abs(part) * tl.load(average_scales + row, mask=row_mask, other=0.0)[:, None]
            part = tl.load(squares + at, mask=mask, other=0).to(tl.float32) / 255
            square = _fourth(part) * tl.load(square_scales + row, mask=row_mask, other=0.0)[:, None]
        else:
            average = tl.load(averages + at, mask=mask, other=0.0).to(tl.float32)
            square = tl.load(squares + at, mask=mask, other=0.0).to(tl.float32)
        average = average + (1 - beta1) * (gradient - average)
        square = beta2 * square + (1 - beta2) * gradient * gradient
        spread = tl.sqrt(square) / tl.sqrt(1 - tl.exp(count * log_beta2)) + eps
        change = average / spread * (rate / (1 - tl.exp(count * log_beta1)))
        parameter = tl.load(parameters + at, mask=mask, other=0.0) * kept - change
        tl.store(parameters + at, parameter, mask=mask)

        x = (at + first_number).to(tl.uint32) * 0x9E3779B1 + count.to(tl.uint32) * 0x85EBCA6B + seed.to(tl.uint32)
        x = (x ^ (x >> 16)) * 0x21F0AAAD
        x = (x ^ (x >> 15)) * 0xD35A2D97
        x = x ^ (x >> 15)
        noise, other_noise = x & 0xFFFF, x >> 16
        if is_int8:
            largest = tl.max(tl.abs(average), axis=1)
            ratio = tl.minimum(tl.abs(average) / tl.maximum(largest, 1e-30)[:, None], 1.0)
            lower = tl.floor(127 * tl.sqrt(ratio))
            low, high = lower / 127 * (lower / 127), (lower + 1) / 127 * ((lower + 1) / 127)
            up = (ratio - low) / (high - low) * 65536 > noise.to(tl.float32)
            code = tl.minimum(lower + tl.where(up, 1.0, 0.0), 127.0)
            tl.store(averages + at, tl.where(average < 0, -code, code).to(tl.int8), mask=mask)
            tl.store(average_scales + row, largest, mask=row_mask)
            largest = tl.max(square, axis=1)
            ratio = tl.minimum(square / tl.maximum(largest, 1e-30)[:, None], 1.0)
            lower = tl.floor(255 * tl.sqrt(tl.sqrt(ratio)))
            low, high = _fourth(lower / 255), _fourth((lower + 1) / 255)
            up = (ratio - low) / (high - low) * 65536 > other_noise.to(tl.float32)
            code = tl.minimum(lower + tl.where(up, 1.0, 0.0), 255.0)
            code = tl.where(square > 0, tl.maximum(code, 1.0), code)
            tl.store(squares + at, code.to(tl.uint8), mask=mask)
            tl.store(square_scales + row, largest, mask=row_mask)
        else:
            tl.store(averages + at, _to_bf16(average, noise), mask=mask)
            tl.store(squares + at, _to_bf16(square, other_noise), mask=mask)
