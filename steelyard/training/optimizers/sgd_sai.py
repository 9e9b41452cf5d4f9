"""SGD-SaI (scaled at initialisation): momentum SGD with a learning-rate factor per tensor, and decoupled weight decay.

The factor is set once: the gradient signal-to-noise ratio ||g|| / (std(g) + eps), from the first gradient of the whole
tensor, over all its shards. The ratio is part of the optimizer state and is saved with it. The state is half of
AdamW's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from steelyard.core.recipe.optim_section import OptimSection
from steelyard.parallel.mesh import MeshAxis
from steelyard.training.optimizers import OptimParam, param_groups
from steelyard.training.optimizers.sgd import Sgd


def build(params: list[OptimParam], optim: OptimSection, stage: MeshAxis) -> SgdSai:
    """SGD-SaI for all parameters."""
    return SgdSai(param_groups(params), optim.learning_rate, optim.momentum)


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
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.float()
                first = gradient / self.grad_scale
                self.state[parameter] = {"gsnr": ratios[parameter].clone(), "momentum": first}

    def make_state(self) -> None:
        """Create the state for a checkpoint to be loaded into."""
        self.start(
            {parameter: self.grad_scale.new_zeros(()) for group in self.param_groups for parameter in group["params"]}
        )
        self.step()

    def _update(self, state: dict[str, Tensor], gradient: Tensor, group: dict[str, Any]) -> tuple[Tensor, Any]:
        momentum = torch.lerp(state["momentum"], gradient, 1 - group["momentum"])
        return momentum, group["lr"] * state["gsnr"]
