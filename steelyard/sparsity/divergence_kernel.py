"""The divergence between two rows of logits as one Triton kernel: two passes, the gradient overwrites the first logits.

`distillation.token_divergence` is the specification; tests compare this kernel with it. This module is imported only on
a GPU, because other machines may not have Triton.

Tensor suffixes: N tokens, V rows of the head.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
WARPS = 8


def fused_divergence(logits_NV: Tensor, dense_NV: Tensor, real_rows: int, temperature: float) -> tuple[Tensor, Tensor]:
    """The divergence of each token. Its gradient overwrites the logits."""
    divergence_N = torch.empty(len(logits_NV), dtype=torch.float32, device=logits_NV.device)
    _kernel[(len(logits_NV),)](
        logits_NV, dense_NV, divergence_N, logits_NV.shape[1], real_rows, temperature, BLOCK, num_warps=WARPS
    )
    return divergence_N, logits_NV


@triton.jit  # type: ignore[untyped-decorator]
def _kernel(logits, dense, divergences, width, real, temperature, block: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    logits += row * width
    dense += row * width
    largest_q = -float("inf")
    largest_p = -float("inf")
    total_q = 0.0
    total_p = 0.0
    weighted = 0.0  # sum over v of exp(p_v - largest_p) (p_v - q_v)
    for first in range(0, real, block):
        columns = first + tl.arange(0, block)
        is_real = columns < real
        q = tl.load(logits + columns, mask=is_real, other=-float("inf")).to(tl.float32) / temperature
        p = tl.load(dense + columns, mask=is_real, other=-float("inf")).to(tl.float32) / temperature
        new_q = tl.maximum(largest_q, tl.max(q, 0))
        new_p = tl.maximum(largest_p, tl.max(p, 0))
        power_p = tl.exp(p - new_p)
        shrink_p = tl.exp(largest_p - new_p)
        total_q = total_q * tl.exp(largest_q - new_q) + tl.sum(tl.exp(q - new_q), 0)
        total_p = total_p * shrink_p + tl.sum(power_p, 0)
        weighted = weighted * shrink_p + tl.sum(tl.where(is_real, power_p * (p - q), 0.0), 0)
        largest_q = new_q
        largest_p = new_p
    log_q = largest_q + tl.log(total_q)
    log_p = largest_p + tl.log(total_p)
    tl.store(divergences + row, temperature * temperature * (weighted / total_p + log_q - log_p))
    for first in range(0, width, block):
        columns = first + tl.arange(0, block)
        is_real = columns < real
        q = tl.load(logits + columns, mask=is_real, other=-float("inf")).to(tl.float32) / temperature
        p = tl.load(dense + columns, mask=is_real, other=-float("inf")).to(tl.float32) / temperature
        gradient = temperature * (tl.exp(q - log_q) - tl.exp(p - log_p))
        tl.store(logits + columns, gradient.to(logits.dtype.element_ty), mask=columns < width)
