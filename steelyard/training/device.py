"""Device and precision of a run or command."""

from __future__ import annotations

import torch

from steelyard.checkpoint.formats import CheckpointSource
from steelyard.core.errors import UserError
from steelyard.core.recipe import Recipe
from steelyard.model import cpu_bf16
from steelyard.sizes.memory import RESERVED

NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
FP8_SINCE = (8, 9)  # compute capability


def choose(recipe: Recipe) -> torch.device:
    """The device of `train.device`; `auto` is a GPU if there is one."""
    name = recipe.train.device
    has_gpu = torch.cuda.is_available()
    if name == "cuda" and not has_gpu:
        raise UserError("no CUDA device is available", where=recipe.where("train.device"), hint="use auto or cpu")
    is_cuda = name == "cuda" or (name == "auto" and has_gpu)
    if recipe.train.precision == "fp8" and not has_fp8(is_cuda):
        raise UserError(
            "this device does not support fp8", where=recipe.where("train.precision"), hint='use "bf16" here'
        )
    return torch.device("cuda" if is_cuda else "cpu")


def has_fp8(is_cuda: bool) -> bool:
    """Whether this device has fp8 products. `fp8.py` also runs on a CPU, for tests, but rounds for nothing there."""
    return is_cuda and torch.cuda.get_device_capability() >= FP8_SINCE


def compute_dtype(precision: str, device: torch.device) -> torch.dtype:
    """The dtype of a precision; a CPU without bf16 instructions is prepared for it."""
    dtype = DTYPES[precision]
    if dtype == torch.bfloat16 and device.type == "cpu":
        cpu_bf16.use_fp32_products()
    return dtype


def compiles(recipe: Recipe, device: torch.device) -> bool:
    """Whether layers are compiled: `train.compile` if set, otherwise on a GPU if the schedule allows it."""
    if recipe.train.compile is not None:
        return recipe.train.compile
    return device.type == "cuda" and not (recipe.parallel.pipeline > 1 and recipe.parallel.schedule == "zero-bubble")


def device_for(name: str) -> torch.device:
    """The device for `auto`, `cpu` or `cuda` on this machine."""
    has_gpu = torch.cuda.is_available()
    if name == "cuda" and not has_gpu:
        raise UserError("no CUDA device is available", hint="use --device auto or cpu")
    return torch.device("cuda" if name == "cuda" or (name == "auto" and has_gpu) else "cpu")


def dtype_for(name: str, source: CheckpointSource, device: torch.device) -> torch.dtype:
    """The compute dtype; `auto` is fp32 on a CPU and the checkpoint's dtype on a GPU."""
    if name != "auto":
        return compute_dtype(name, device)
    return source.dtype if device.type == "cuda" and source.dtype in NAMES else torch.float32


def usable_memory(device: torch.device) -> int | None:
    """Bytes of a GPU for tensors; None for a CPU."""
    return torch.cuda.get_device_properties(device).total_memory - RESERVED if device.type == "cuda" else None


def name(device: torch.device) -> str:
    """The name of the device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
