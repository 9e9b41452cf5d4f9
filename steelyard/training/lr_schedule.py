"""The course of the learning rate."""

from __future__ import annotations

import math
from dataclasses import dataclass

from steelyard.core.recipe.optim_section import UNITS, OptimSection


@dataclass(frozen=True)
class TrainProgress:
    """How far a schedule is, in every unit it may be measured in."""

    steps: int
    samples: int
    tokens: int


def learning_rate(optim: OptimSection, at: TrainProgress, end: TrainProgress) -> float:
    """The rate of the step that ends at `at`, in a run that ends at `end`: a climb, then down to the minimum.

    The schedule ends at its horizon, or with the run; behind its end the rate stays at the minimum.
    """
    top, floor = optim.learning_rate, optim.min_learning_rate
    climb, climbed = _measured(optim, "warmup", at) or (math.ceil(optim.warmup_share * end.steps), at.steps)
    if climbed < climb:
        return top * climbed / climb
    horizon, passed = _measured(optim, "decay", at) or (end.steps, at.steps)
    # The climb in the horizon's unit, which may be another one.
    begun = climb * (passed / climbed) if climb else 0.0
    done = min(1.0, (passed - begun) / max(1.0, horizon - begun))
    return floor + (top - floor) * _remaining(optim, done, passed / horizon)


def _measured(optim: OptimSection, length: str, at: TrainProgress) -> tuple[int, int] | None:
    """A length that the recipe gives, and how much of it has passed, in the recipe's unit."""
    for unit in UNITS:
        given = getattr(optim, f"{length}_{unit}")
        if given:
            return given, getattr(at, unit)
    return None


def _remaining(optim: OptimSection, done: float, passed: float) -> float:
    """How much of the way from the minimum to the top is left: 1 at the end of the climb."""
    if optim.schedule == "constant":
        return 1.0
    if optim.schedule == "linear":
        return 1 - done
    if optim.schedule == "wsd":  # Warm up, stay, decline: linearly, over the last share of the horizon.
        return min(1.0, max(0.0, (1 - passed) / optim.decay_fraction))
    return (1 + math.cos(math.pi * done)) / 2
