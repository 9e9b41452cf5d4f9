"""The course of the learning rate."""

from __future__ import annotations

import math

from steelyard.core.recipe.optim import Optim


def learning_rate(optim: Optim, step: int, steps: int) -> float:
    """The rate for step number `step` of `steps` (the first is 1): a linear climb, then down to the minimum.

    The schedule ends at `optim.horizon_steps`, or with the run; behind its end the rate stays at the minimum.
    """
    top, floor = optim.learning_rate, optim.min_learning_rate
    if step <= optim.warmup_steps:
        return top * step / optim.warmup_steps
    horizon = optim.horizon_steps or steps
    done = min(1.0, (step - optim.warmup_steps) / max(1, horizon - optim.warmup_steps))
    return floor + (top - floor) * _remaining(optim, done, step / horizon)


def _remaining(optim: Optim, done: float, passed: float) -> float:
    """How much of the way from the minimum to the top is left: 1 at the end of the climb."""
    if optim.schedule == "constant":
        return 1.0
    if optim.schedule == "linear":
        return 1 - done
    if optim.schedule == "wsd":  # Warm up, stay, decline: linearly, over the last share of the horizon.
        return min(1.0, max(0.0, (1 - passed) / optim.decline))
    return (1 + math.cos(math.pi * done)) / 2
