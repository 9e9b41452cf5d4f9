"""AdamW's update as a Triton kernel for one large tensor. torch's fused AdamW is the specification.

This module is imported only on machines with a GPU, since others may have no Triton.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048


def move(
    parameter: Tensor,
    gradient: Tensor,
    state: dict[str, Tensor],
    grad_scale: Tensor,
    found_inf: Tensor,
    rate: float,
    betas: tuple[float, float],
    eps: float,
    decay: float,
) -> None:
    """Update one parameter. `state["step"]` is the number of earlier steps; the caller increments it."""
    size = parameter.numel()
    logs = [math.log(beta) if beta else -1e30 for beta in betas]
    _kernel[(-(-size // BLOCK),)](
        parameter, gradient, state["exp_avg"], state["exp_avg_sq"], state["step"], grad_scale, found_inf, size,
        rate, betas[0], betas[1], logs[0], logs[1], eps, 1 - rate * decay, BLOCK,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rate", "kept"])  # type: ignore[untyped-decorator]
def _kernel(  # type: ignore[no-untyped-def]
    parameters, gradients, averages, squares, step, grad_scale, found_inf, size,
    rate, beta1, beta2, log_beta1, log_beta2, eps, kept, block: tl.constexpr,
):  # fmt: skip
    if tl.load(found_inf) == 0:
        at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
        mask = at < size
        count = tl.load(step) + 1
        gradient = tl.load(gradients + at, mask=mask).to(tl.float32) / tl.load(grad_scale)
        average = beta1 * tl.load(averages + at, mask=mask) + (1 - beta1) * gradient
        square = beta2 * tl.load(squares + at, mask=mask) + (1 - beta2) * gradient * gradient
        correction = 1 - tl.exp(count * log_beta1)
        correction_of_squares = 1 - tl.exp(count * log_beta2)
        spread = tl.sqrt(square) / tl.sqrt(correction_of_squares) + eps
        parameter = tl.load(parameters + at, mask=mask) * kept - rate / correction * average / spread
        tl.store(averages + at, average, mask=mask)
        tl.store(squares + at, square, mask=mask)
        tl.store(parameters + at, parameter, mask=mask)
