"""Where a run computes, and in which precision."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from steelyard.core.errors import UserError
from steelyard.core.recipe import Recipe


def choose(recipe: Recipe) -> torch.device:
    """The device of `train.device`; `auto` is a GPU where there is one."""
    wanted = recipe.train.device
    if wanted == "cuda" and not torch.cuda.is_available():
        raise UserError("no CUDA device is available", where=recipe.where("train.device"), mend="use auto or cpu")
    has_gpu = torch.cuda.is_available()
    return torch.device("cuda" if wanted == "cuda" or (wanted == "auto" and has_gpu) else "cpu")


def precision(recipe: Recipe, device: torch.device) -> AbstractContextManager[object]:
    """What the forward pass runs under: weights stay fp32, bf16 applies to matrix products."""
    if recipe.train.precision == "bf16":
        return torch.autocast(device.type, dtype=torch.bfloat16)
    return nullcontext()
