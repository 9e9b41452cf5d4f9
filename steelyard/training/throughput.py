"""Throughput of a run: tokens per second, TFLOP/s, and MFU (share of the device's peak)."""

from __future__ import annotations

import torch

from steelyard.core.recipe import Recipe
from steelyard.sizes.gpu_catalogue import by_device_name
from steelyard.sizes.param_count import flops_per_token


class Speed:
    """Computes the throughput fields of a record from tokens and seconds."""

    def __init__(self, recipe: Recipe, device: torch.device, ranks: int) -> None:
        self.ranks = ranks
        self.flops = flops_per_token(recipe.model, recipe.data.sequence_length)
        gpu = by_device_name(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
        # fp8 speeds up only some products; relative to bf16's peak all runs are comparable.
        precision = "bf16" if recipe.train.precision == "fp8" else recipe.train.precision
        self.peak = None if gpu is None else gpu.peak(precision)
        self._tokens: int | None = None

    def begin(self, tokens: int) -> None:
        """Start counting at `tokens`."""
        self._tokens = tokens

    def of(self, tokens: int, seconds: float, steps: int) -> dict[str, float]:
        """Throughput since the last call: tokens of the whole job, TFLOP/s per device."""
        rate = (tokens - (self._tokens or 0)) / seconds
        self._tokens = tokens
        each = rate * self.flops / self.ranks
        speed = {"tokens_per_second": rate, "seconds": seconds / steps, "tflops": each / 1e12}
        return speed if self.peak is None else speed | {"mfu": each / self.peak}
