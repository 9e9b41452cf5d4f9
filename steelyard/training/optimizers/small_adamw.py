"""AdamW with its state in 16 or 8 bits (`optim.state`). `state_codes.py` defines how it is stored.

A checkpoint holds the moments in fp32, as AdamW's own: a run resumes with any kind of state, on any layout.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import Tensor

from steelyard.core.recipe.optim_section import OptimSection
from steelyard.parallel.param_shards import ParamShard
from steelyard.training.optimizers import OptimParam, param_groups
from steelyard.training.optimizers import state_codes as codes

MOMENTS = ("exp_avg", "exp_avg_sq")


class SmallAdamW(torch.optim.Optimizer):
    """AdamW whose moments are rounded stochastically after each step."""

    grad_scale: Tensor
    found_inf: Tensor

    def __init__(self, params: list[OptimParam], optim: OptimSection) -> None:
        defaults = {"lr": optim.learning_rate, "betas": tuple(optim.betas), "eps": optim.eps, "weight_decay": 0.0}
        super().__init__(param_groups(params), defaults)
        self.kind = optim.state
        self.numbers = {each.tensor: _numbers(each.shard) for each in params}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def checkpoint_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """The state of a parameter as fp32 on the host, for a checkpoint."""
        state = self.state.get(parameter)
        if not state:
            return {}
        moments = zip(MOMENTS, codes.read(state, self.kind), strict=True)
        return {"step": state["step"]} | {name: each.view(parameter.shape).cpu() for name, each in moments}

    def load_checkpoint_state(self, parameter: Tensor, saved: dict[str, Tensor]) -> None:
        """Store the fp32 moments of a checkpoint; `step` is loaded already."""
        first, second = (saved[name].to(parameter.device).view(-1) for name in MOMENTS)
        codes.write(self.state[parameter], self.kind, first, second, None)

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        if not self.state[parameter]:
            self.state[parameter] = codes.empty(parameter, self.kind)
        state, gradient = self.state[parameter], parameter.grad
        assert gradient is not None
        options = (group["lr"], group["betas"], group["eps"], group["weight_decay"])
        if parameter.is_cuda:
            from steelyard.training.optimizers import small_adamw_kernel

            update = small_adamw_kernel.update
        else:
            update = plain_update
        update(parameter, gradient, state, self.kind, self.grad_scale, self.found_inf, self.numbers[parameter], options)
        state["step"].add_(1 - self.found_inf)


def plain_update(
    parameter: Tensor,
    gradient: Tensor,
    state: dict[str, Tensor],
    kind: str,
    grad_scale: Tensor,
    found_inf: Tensor,
    numbers: tuple[int, int],
    options: tuple[float, tuple[float, float], float, float],
) -> None:
    """AdamW for one parameter, in plain torch. `numbers` are the seed of its noise and the number of its first element.

    `state["step"]` is the number of earlier steps; the caller increments it.
    """
    rate, (beta1, beta2), eps, decay = options
    first, second = codes.read(state, kind)
    count = state["step"] + 1
    scaled = gradient.flatten().float() / grad_scale
    new_first, new_second = torch.lerp(first, scaled, 1 - beta1), beta2 * second + (1 - beta2) * scaled.square()
    spread = new_second.sqrt() / (1 - beta2**count).sqrt() + eps
    step = (new_first / spread * (rate / (1 - beta1**count))).view_as(parameter)
    skip = found_inf.bool()
    before = {name: value.clone() for name, value in state.items()}
    codes.write(state, kind, new_first, new_second, codes.noise_of(numbers[0], count, numbers[1], first.numel()))
    for name, value in state.items():
        value.copy_(torch.where(skip, before[name], value))
    parameter.copy_(torch.where(skip, parameter, parameter * (1 - rate * decay) - step))


def _numbers(shard: ParamShard) -> tuple[int, int]:
    """The seed of a parameter's noise, and the number of the shard's first element."""
    row = 1
    for size in shard.tensor.shape[1:]:
        row *= size
    return zlib.crc32(shard.name.encode()), shard.offset[0] * row if shard.offset else 0
