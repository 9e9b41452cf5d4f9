"""The objective of a trial: many values reduced to one, while the trial runs.

The values are a key of metrics.jsonl or the matches of a regular expression in the output. Warm-up values are skipped,
the others are reduced to one number. The same is done for the values so far, to detect a trial that falls behind.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Sequence
from typing import Any, Literal

from pydantic import NonNegativeInt, model_validator

from steelyard.core.recipe.section import Section

Pick = Literal["first", "last", "min", "max", "mean", "median", "harmonic_mean"]
Goal = Literal["maximize", "minimize"]
# Default goal and reduction of a metric.
USUAL: dict[str, tuple[Goal, Pick]] = {
    "tokens_per_second": ("maximize", "median"),
    "tflops": ("maximize", "median"),
    "mfu": ("maximize", "median"),
    "seconds": ("minimize", "median"),
    "loss": ("minimize", "last"),
    "valid_loss": ("minimize", "last"),
    "peak_memory": ("minimize", "max"),
}
SPEEDS = ("tokens_per_second", "tflops", "mfu", "seconds")
PICKS: dict[str, Callable[[Sequence[float]], float]] = {
    "first": lambda values: values[0],
    "last": lambda values: values[-1],
    "min": min,
    "max": max,
    "mean": statistics.fmean,
    "median": statistics.median,
    "harmonic_mean": lambda values: len(values) / math.fsum(1 / v for v in values) if min(values) > 0 else math.nan,
}
LONGEST_CURVE = 200


class Objective(Section):
    """One entry of `[[objectives]]`."""

    name: str | None = None
    metric: str | None = None
    regex: str | None = None
    pick: Pick | None = None
    goal: Goal | None = None
    skip: NonNegativeInt = 0

    @model_validator(mode="after")
    def _is_whole(self) -> Objective:
        if (self.metric is None) == (self.regex is None):
            raise ValueError("set either metric (a key of metrics.jsonl) or regex (for the output)")
        if self.regex is not None:
            try:
                groups = re.compile(self.regex).groups
            except re.error as error:
                raise ValueError(f"invalid regular expression: {error}") from None
            if groups > 1:
                raise ValueError("a regular expression has at most one group, around the number")
        if self.goal is None and self.metric not in USUAL:
            raise ValueError('set goal = "maximize" or goal = "minimize"')
        return self

    @property
    def label(self) -> str:
        """Its name in tables."""
        return self.name or self.metric or str(self.regex)

    @property
    def direction(self) -> Goal:
        """Whether to maximize or minimize."""
        return self.goal or USUAL[str(self.metric)][0]

    @property
    def picked(self) -> Pick:
        """How the values are reduced to one."""
        return self.pick or USUAL.get(self.metric or "", ("maximize", "last"))[1]

    @property
    def is_speed(self) -> bool:
        """Whether the planner's step time predicts which points are promising."""
        return self.metric in SPEEDS

    def better(self, one: float, other: float) -> bool:
        """Whether the first is better than the second."""
        return one > other if self.direction == "maximize" else one < other


class ObjectiveValues:
    """The values of one objective, read while a trial runs."""

    def __init__(self, objective: Objective) -> None:
        self.objective = objective
        self._pattern = None if objective.regex is None else re.compile(objective.regex)
        self._found = 0
        self.no_number: str | None = None
        """The first match of the regular expression that is not a number."""
        self._values: list[float] = []
        self.curve: list[tuple[int, float]] = []
        """Step (or index of the match), and the reduced value up to it."""

    def record(self, record: dict[str, Any]) -> None:
        """Add a record of metrics.jsonl."""
        value = record.get(self.objective.metric or "")
        if self._pattern is None and isinstance(value, int | float) and record["step"] > self.objective.skip:
            self._add(int(record["step"]), float(value))

    def line(self, output: str) -> None:
        """Add a line of output."""
        if self._pattern is None:
            return
        for match in self._pattern.finditer(output):
            text = match[1] if self._pattern.groups else match[0]
            try:
                value = float(text.replace(",", ""))
            except (ValueError, AttributeError):
                self.no_number = self.no_number or text
                continue
            self._found += 1
            if self._found > self.objective.skip:
                self._add(self._found, value)

    def _add(self, step: int, value: float) -> None:
        self._values.append(value)
        if len(self._values) % (1 + len(self._values) // LONGEST_CURVE):
            return  # Reducing all values again for each new one would be quadratic.
        so_far = self.value
        if so_far is not None and math.isfinite(so_far):
            self.curve.append((step, so_far))

    def missing(self) -> str | None:
        """Why there is no value; None if there is one."""
        if self.value is not None:
            return None
        if self.no_number is not None:
            group = "" if self._pattern is None or self._pattern.groups else ": put a group ( ) around the number"
            return f"{self.objective.label} matched {self.no_number[:80]!r}, which is not a number{group}"
        skipped = self.objective.skip
        if 0 < self._found <= skipped:
            return f"{self.objective.label} was found {self._found} times, all within skip = {skipped}"
        return f"{self.objective.label} was not found"

    @property
    def value(self) -> float | None:
        """The reduced value so far; None without values."""
        if not self._values:
            return None
        if self.objective.picked not in ("first", "last") and any(map(math.isnan, self._values)):
            return math.nan  # min, max and median are undefined for NaN.
        return PICKS[self.objective.picked](self._values)

    def short_curve(self) -> list[tuple[int, float]]:
        """The curve, thinned to be stored with the trial."""
        every = -(-len(self.curve) // LONGEST_CURVE)
        return self.curve[::every] if every > 1 else self.curve


def at_step(curve: Sequence[Sequence[float]], step: int) -> float | None:
    """The value of a curve at a step; None if it starts later."""
    before = [value for when, value in curve if when <= step]
    return before[-1] if before else None
