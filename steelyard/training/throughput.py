"""How fast a run is: tokens, arithmetic, and the share of what the device could do at most."""

from __future__ import annotations

import torch

from steelyard.core.recipe import Recipe
from steelyard.sizes.gpu_catalogue import by_device_name
from steelyard.sizes.param_count import flops_per_token


class Speed:
    """Turns tokens and seconds into the numbers of a record."""

    def __init__(self, recipe: Recipe, device: torch.device, ranks: int) -> None:
        self.ranks = ranks
        self.flops = flops_per_token(recipe.model, recipe.data.sequence_length)
        gpu = by_device_name(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
        # fp8 speeds up some of the products; measured against bf16's peak all runs can be compared.
        precision = "bf16" if recipe.train.precision == "fp8" else recipe.train.precision
        self.peak = None if gpu is None else gpu.peak(precision)
        self._tokens: int | None = None

    def begin(self, tokens: int) -> None:
        """Count from so many tokens on."""
        self._tokens = tokens

    def of(self, tokens: int, seconds: float, steps: int) -> dict[str, float]:
        """Speed since the last time: of the whole job, and arithmetic per device."""
        rate = (tokens - (self._tokens or 0)) / seconds
        self._tokens = tokens
        each = rate * self.flops / self.ranks
        speed = {"tokens_per_second": rate, "seconds": seconds / steps, "tflops": each / 1e12}
        return speed if self.peak is None else speed | {"mfu": each / self.peak}
