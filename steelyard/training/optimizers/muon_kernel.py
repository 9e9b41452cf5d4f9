"""Muon's operations per element as Triton kernels: one pass over memory each. `muon_elementwise.py` defines them.

This module is imported only on machines with a GPU, since others may have no Triton.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048


def add_gradient(
    gradient: Tensor,
    momentum: Tensor,
    out: Tensor | None,
    grad_scale: Tensor,
    found_inf: Tensor,
    beta: float,
    nesterov: bool,
) -> None:
    """Add a gradient to the momentum, and write what Muon orthogonalizes."""
    size = momentum.numel()
    _add_gradient[(-(-size // BLOCK),)](
        gradient, momentum, momentum if out is None else out, grad_scale, found_inf, size, beta,
        out is not None, nesterov, BLOCK,
    )  # fmt: skip


def apply_update(parameter: Tensor, update: Tensor, found_inf: Tensor, kept: float, rate: float) -> None:
    """parameter * kept - rate * update, unless `found_inf` is 1."""
    size = parameter.numel()
    _apply_update[(-(-size // BLOCK),)](parameter, update, found_inf, size, kept, rate, BLOCK)


@triton.jit  # type: ignore[untyped-decorator]
def _add_gradient(  # type: ignore[no-untyped-def]
    gradients, momenta, outs, grad_scale, found_inf, size, beta,
    writes: tl.constexpr, nesterov: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    mask = at < size
    skip = tl.load(found_inf) != 0
    gradient = tl.where(skip, 0.0, tl.load(gradients + at, mask=mask).to(tl.float32) / tl.load(grad_scale))
    before = tl.load(momenta + at, mask=mask)
    momentum = before + (1 - beta) * (gradient - before)
    if writes:
        if nesterov:
            tl.store(outs + at, (gradient + beta * (momentum - gradient)).to(outs.dtype.element_ty), mask=mask)
        else:
            tl.store(outs + at, momentum.to(outs.dtype.element_ty), mask=mask)
    tl.store(momenta + at, tl.where(skip, before, momentum), mask=mask)


@triton.jit(do_not_specialize=["kept", "rate"])  # type: ignore[untyped-decorator]
def _apply_update(parameters, updates, found_inf, size, kept, rate, block: tl.constexpr):  # type: ignore[no-untyped-def]
    if tl.load(found_inf) == 0:
        at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
        mask = at < size
        update = tl.load(updates + at, mask=mask).to(tl.float32)
        tl.store(parameters + at, tl.load(parameters + at, mask=mask) * kept - rate * update, mask=mask)
