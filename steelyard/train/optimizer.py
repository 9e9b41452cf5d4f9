"""Building the optimizer, and its state as tensors by name."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from steelyard.core.recipe.optim import Optim
from steelyard.train.sgd import Sgd, SgdSai


def build(model: nn.Module, optim: Optim) -> torch.optim.Optimizer:
    """The recipe's optimizer, with decay on matrices and none on norms and biases."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": optim.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    if optim.name == "sgd":
        return Sgd(groups, optim.learning_rate, optim.momentum)
    if optim.name == "sgd-sai":
        return SgdSai(groups, optim.learning_rate, optim.momentum, optim.eps)
    return torch.optim.AdamW(
        groups, lr=optim.learning_rate, betas=(optim.betas[0], optim.betas[1]), eps=optim.eps, fused=True
    )


def state_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's state as `optimizer.<parameter>.<entry>`."""
    return {
        f"optimizer.{name}.{entry}": value
        for name, parameter in model.named_parameters()
        for entry, value in optimizer.state.get(parameter, {}).items()
    }


def make_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Have the optimizer create its state, so that a checkpoint can be loaded into it: one step that moves nothing."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
