"""AdamW, with a Triton kernel for large tensors on a GPU.

torch's fused AdamW is the specification, and updates all other tensors: it takes many small tensors in one launch, but
reaches only two thirds of the memory bandwidth on large ones. The state has the same names and shapes in both cases,
gradients are divided by `grad_scale`, and nothing is updated if `found_inf` is 1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from steelyard.core.recipe.optim_section import OptimSection
from steelyard.parallel.mesh import MeshAxis
from steelyard.training.optimizers import OptimParam, param_groups
from steelyard.training.optimizers.small_adamw import SmallAdamW

LARGE = 1 << 22  # elements; for smaller tensors a launch per tensor costs the host more than torch's shared launch

CAST = 1 << 16  # elements; torch's AdamW takes no bf16 gradients, so those of smaller tensors are cast


def build(params: list[OptimParam], optim: OptimSection, stage: MeshAxis) -> AdamW | SmallAdamW:
    """AdamW for all parameters."""
    if optim.state != "fp32":
        return SmallAdamW(params, optim)
    return AdamW(param_groups(params), **options(optim))


def options(optim: OptimSection) -> dict[str, Any]:
    """The recipe's options of AdamW."""
    return {"lr": optim.learning_rate, "betas": tuple(optim.betas), "eps": optim.eps, "fused": True}


class AdamW(torch.optim.AdamW):
    """torch's AdamW at full memory bandwidth."""

    grad_scale: Tensor
    found_inf: Tensor

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        updated = [
            (parameter, parameter.grad)
            for group in self.param_groups
            for parameter in group["params"]
            if _is_large(parameter) and self._update_large(parameter, group)
        ]
        if updated:
            steps = [self.state[parameter]["step"] for parameter, _ in updated]
            torch._foreach_add_(steps, [1 - self.found_inf] * len(steps))  # A single tensor would synchronise.
        for parameter, _ in updated:
            parameter.grad = None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad = parameter.grad.to(parameter.dtype)
        super().step()
        for parameter, gradient in updated:
            parameter.grad = gradient

    def _update_large(self, parameter: Tensor, group: dict[str, Any]) -> bool:
        from steelyard.training.optimizers.adamw_kernel import move

        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        assert parameter.grad is not None
        move(
            parameter, parameter.grad, state, self.grad_scale, self.found_inf,
            group["lr"], group["betas"], group["eps"], group["weight_decay"],
        )  # fmt: skip
        return True


def _is_large(parameter: Tensor) -> bool:
    gradient = parameter.grad
    return (
        parameter.is_cuda
        and gradient is not None
        and parameter.numel() >= (LARGE if gradient.dtype == parameter.dtype else CAST)
        and parameter.is_contiguous()
        and gradient.is_contiguous()
    )
