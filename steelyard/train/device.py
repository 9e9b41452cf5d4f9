"""Where a run computes, and in which precision."""

from __future__ import annotations

import torch

from steelyard.core.errors import UserError
from steelyard.core.recipe import Recipe

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
FP8_SINCE = (8, 9)  # compute capability


def choose(recipe: Recipe) -> torch.device:
    """The device of `train.device`; `auto` is a GPU where there is one."""
    wanted = recipe.train.device
    has_gpu = torch.cuda.is_available()
    if wanted == "cuda" and not has_gpu:
        raise UserError("no CUDA device is available", where=recipe.where("train.device"), mend="use auto or cpu")
    is_cuda = wanted == "cuda" or (wanted == "auto" and has_gpu)
    if recipe.train.precision == "fp8" and (not is_cuda or torch.cuda.get_device_capability() < FP8_SINCE):
        raise UserError(
            "this device has no fp8 arithmetic", where=recipe.where("train.precision"), mend='use "bf16" here'
        )
    return torch.device("cuda" if is_cuda else "cpu")


def compiles(recipe: Recipe, device: torch.device) -> bool:
    """Whether layers are compiled: as `train.compile` says, or on a GPU where the schedule allows it."""
    if recipe.train.compile is not None:
        return recipe.train.compile
    return device.type == "cuda" and not (recipe.parallel.pipeline > 1 and recipe.parallel.schedule == "zero-bubble")
