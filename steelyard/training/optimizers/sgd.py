"""SGD with momentum and decoupled weight decay.

Like torch's fused AdamW it divides gradients by `grad_scale` and changes nothing if `found_inf` is 1, without a device
synchronisation.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from steelyard.core.recipe.optim_section import OptimSection
from steelyard.parallel.mesh import MeshAxis
from steelyard.training.optimizers import OptimParam, param_groups


def build(params: list[OptimParam], optim: OptimSection, stage: MeshAxis) -> Sgd:
    """SGD for all parameters."""
    return Sgd(param_groups(params), optim.learning_rate, optim.momentum)


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
                gradient = parameter.grad.float() / self.grad_scale
                momentum, rate = self._update(state, gradient, group)
                updated = parameter * (1 - group["lr"] * group["weight_decay"]) - momentum * rate
                parameter.copy_(torch.where(skip, parameter, updated))
                state["momentum"].copy_(torch.where(skip, state["momentum"], momentum))

    def _update(self, state: dict[str, Tensor], gradient: Tensor, group: dict[str, Any]) -> tuple[Tensor, Any]:
        """The new momentum, and the factor on it."""
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(gradient)
        return state["momentum"] * group["momentum"] + gradient, group["lr"]
