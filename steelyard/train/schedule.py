"""The course of the learning rate."""

from __future__ import annotations

import math

from steelyard.core.recipe.optim import Optim


def learning_rate(optim: Optim, step: int, steps: int) -> float:
    """The rate for step number `step` of `steps` (the first is 1): a linear climb, then down to the minimum."""
    top, floor = optim.learning_rate, optim.min_learning_rate
    if step <= optim.warmup_steps:
        return top * step / optim.warmup_steps
    done = (step - optim.warmup_steps) / max(1, steps - optim.warmup_steps)
    if optim.schedule == "constant":
        return top
    remaining = 1 - done if optim.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return floor + (top - floor) * remaining
