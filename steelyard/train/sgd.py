"""Gradient descent with momentum, plain and scaled at initialisation, both with decoupled weight decay.

SGD-SaI gives each tensor a learning rate of its own, once: its gradient signal-to-noise ratio ||g|| / (std(g) + eps),
from the first gradient. After that it is momentum SGD, with half of AdamW's state. The ratio is part of the state and
is saved with it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class Sgd(torch.optim.Optimizer):
    """p <- p (1 - lr wd) - lr m, with m <- momentum m + g."""

    def __init__(self, groups: Iterable[dict[str, Any]], lr: float, momentum: float) -> None:
        super().__init__(groups, {"lr": lr, "momentum": momentum, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Move every parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    update, rate = self._update(self.state[parameter], parameter.grad, group)
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    parameter.sub_(update * rate)

    def _update(self, state: dict[str, Tensor], gradient: Tensor, group: dict[str, Any]) -> tuple[Tensor, Any]:
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(gradient)
        state["momentum"].mul_(group["momentum"]).add_(gradient)
        return state["momentum"], group["lr"]


class SgdSai(Sgd):
    """p <- p (1 - lr wd) - lr gsnr m, with m <- momentum m + (1 - momentum) g, and m = g at first."""

    def __init__(self, groups: Iterable[dict[str, Any]], lr: float, momentum: float, eps: float) -> None:
        super().__init__(groups, lr, momentum)
        self.eps = eps

    def _update(self, state: dict[str, Tensor], gradient: Tensor, group: dict[str, Any]) -> tuple[Tensor, Any]:
        if "gsnr" not in state:
            spread = gradient.std() if gradient.numel() > 1 else torch.zeros_like(gradient.sum())
            state["gsnr"] = gradient.norm() / (spread + self.eps)
            state["momentum"] = gradient.clone()
        else:
            state["momentum"].lerp_(gradient, 1 - group["momentum"])
        return state["momentum"], group["lr"] * state["gsnr"]
