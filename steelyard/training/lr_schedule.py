"""The learning-rate schedule."""

from __future__ import annotations

import math
from dataclasses import dataclass

from steelyard.core.recipe.optim_section import UNITS, OptimSection


@dataclass(frozen=True)
class TrainProgress:
    """Progress of a schedule in all its units."""

    steps: int
    samples: int
    tokens: int


def learning_rate(optim: OptimSection, at: TrainProgress, end: TrainProgress) -> float:
    """The rate of the step that ends at `at`, in a run that ends at `end`: warmup, then decay to the minimum.

    The schedule ends after its decay length, or with the run; after that the rate stays at the minimum.
    """
    top, floor = optim.learning_rate, optim.min_learning_rate
    warmup, warmed_up = _measured(optim, "warmup", at) or (math.ceil(optim.warmup_share * end.steps), at.steps)
    if warmed_up < warmup:
        return top * warmed_up / warmup
    decay, passed = _measured(optim, "decay", at) or (end.steps, at.steps)
    # The warmup in the unit of the decay, which may be another one.
    begun = warmup * (passed / warmed_up) if warmup else 0.0
    done = min(1.0, (passed - begun) / max(1.0, decay - begun))
    return floor + (top - floor) * _remaining(optim, done, passed / decay)


def _measured(optim: OptimSection, length: str, at: TrainProgress) -> tuple[int, int] | None:
    """A length that the recipe sets, and the progress, both in the recipe's unit; None if it sets none."""
    for unit in UNITS:
        value = getattr(optim, f"{length}_{unit}")
        if value:
            return value, getattr(at, unit)
    return None


def _remaining(optim: OptimSection, done: float, passed: float) -> float:
    """The factor between the minimum (0) and the maximum rate (1); 1 at the end of the warmup."""
    if optim.schedule == "constant":
        return 1.0
    if optim.schedule == "linear":
        return 1 - done
    if optim.schedule == "wsd":  # Warmup, stable, decay: linear, over the last fraction of the schedule.
        return min(1.0, max(0.0, (1 - passed) / optim.decay_fraction))
    return (1 + math.cos(math.pi * done)) / 2
