"""AdamW, in a kernel of our own where there is a GPU.

torch's fused AdamW is the specification, and what runs everywhere else: the state has the same names and shapes,
gradients are divided by `grad_scale`, and nothing moves where `found_inf` is 1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class AdamW(torch.optim.AdamW):
    """torch's AdamW at the speed of memory."""

    grad_scale: Tensor
    found_inf: Tensor

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Move every parameter that has a gradient."""
        if not self._step_by_kernel():
            super().step()

    def _step_by_kernel(self) -> bool:
        """Whether the kernel could do it: it needs a GPU, whole state and aligned tensors."""
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        gradients = [parameter.grad for parameter in parameters]
        if not parameters[0].is_cuda or not all(self.state.get(parameter) for parameter in parameters):
            return False
        from steelyard.train.kernels import ALIGNMENT, Tables

        if not all(g is not None and g.is_contiguous() and g.data_ptr() % ALIGNMENT == 0 for g in gradients):
            return False
        states = [self.state[parameter] for parameter in parameters]
        if self._tables_of != (places := [state["exp_avg"].data_ptr() for state in states]):
            self._tables_of, self._tables = places, [Tables(*self._tensors(group)) for group in self.param_groups]
        if not all(tables.is_aligned for tables in self._tables):
            return False
        for group, tables in zip(self.param_groups, self._tables, strict=True):
            tables.move(
                [parameter.grad for parameter in group["params"]], self.grad_scale, self.found_inf,
                group["lr"], group["betas"], group["eps"], group["weight_decay"],
            )  # fmt: skip
        torch._foreach_add_([state["step"] for state in states], 1 - self.found_inf)
        return True

    def _tensors(self, group: dict[str, Any]) -> tuple[list[Tensor], ...]:
        states = [self.state[parameter] for parameter in group["params"]]
        return (group["params"], *([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq", "step")))

    _tables: list[Any] = []  # noqa: RUF012
    _tables_of: list[int] | None = None
