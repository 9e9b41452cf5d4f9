"""SGD with momentum and SGD-SaI (scaled at initialisation), both with decoupled weight decay.

SGD-SaI sets a learning-rate factor for each tensor once: its gradient signal-to-noise ratio ||g|| / (std(g) + eps),
from the first gradient of the whole tensor, over all its shards. After that it is momentum SGD, with half of AdamW's
state. The ratio is part of the optimizer state and is saved with it.

Like torch's fused AdamW, both divide gradients by `grad_scale` and change nothing if `found_inf` is 1, without a device
synchronisation.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class Sgd(torch.optim.Optimizer):
    """p <- p (1 - lr wd) - lr m, with m <- momentum m + g."""

    grad_scale: Tensor
    found_inf: Tensor

    def __init__(self, groups: Iterable[dict[str, Any]], lr: float, momentum: float) -> None:
        super().__init__(groups, {"lr": lr, "momentum": momentum, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        skip = self.found_inf.bool()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                gradient = parameter.grad / self.grad_scale
                momentum, rate = self._update(state, gradient, group)
                updated = parameter * (1 - group["lr"] * group["weight_decay"]) - momentum * rate
                parameter.copy_(torch.where(skip, parameter, updated))
                state["momentum"].copy_(torch.where(skip, state["momentum"], momentum))

    def _update(self, state: dict[str, Tensor], gradient: Tensor, group: dict[str, Any]) -> tuple[Tensor, Any]:
        """The new momentum, and the factor on it."""
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(gradient)
        return state["momentum"] * group["momentum"] + gradient, group["lr"]


class SgdSai(Sgd):
    """p <- p (1 - lr wd) - lr gsnr m, with m <- momentum m + (1 - momentum) g, and m = g at first."""

    @property
    def needs_ratios(self) -> bool:
        """Whether the next gradient is the first."""
        return not any("gsnr" in state for state in self.state.values())

    def start(self, ratios: dict[Tensor, Tensor]) -> None:
        """Set the ratio of each parameter, and its first gradient as the initial momentum."""
        for group in self.param_groups:
            for parameter in group["params"]:
                first = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad / self.grad_scale
                self.state[parameter] = {"gsnr": ratios[parameter].clone(), "momentum": first}

    def _update(self, state: dict[str, Tensor], gradient: Tensor, group: dict[str, Any]) -> tuple[Tensor, Any]:
        momentum = torch.lerp(state["momentum"], gradient, 1 - group["momentum"])
        return momentum, group["lr"] * state["gsnr"]
