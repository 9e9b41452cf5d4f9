"""Muon's operations per element, on flat tensors, in plain torch. `muon_kernel.py` has the same as Triton kernels."""

from __future__ import annotations

import torch
from torch import Tensor


def add_gradient(
    gradient: Tensor,
    momentum: Tensor,
    out: Tensor | None,
    grad_scale: Tensor,
    found_inf: Tensor,
    beta: float,
    nesterov: bool,
) -> None:
    """Add a gradient, divided by `grad_scale`, to the momentum, and write what Muon orthogonalizes to `out`.

    If `found_inf` is 1, the momentum does not change, and `out` is finite.
    """
    skip = found_inf.bool()
    gradient = torch.where(skip, 0.0, gradient.float() / grad_scale)
    updated = torch.lerp(momentum, gradient, 1 - beta)
    if out is not None:
        out.copy_(torch.lerp(gradient, updated, beta) if nesterov else updated)
    momentum.copy_(torch.where(skip, momentum, updated))


def apply_update(parameter: Tensor, update: Tensor, found_inf: Tensor, kept: float, rate: float) -> None:
    """parameter * kept - rate * update, unless `found_inf` is 1."""
    updated = torch.add(parameter * kept, update.to(parameter.dtype), alpha=-rate)
    parameter.copy_(torch.where(found_inf.bool(), parameter, updated))
