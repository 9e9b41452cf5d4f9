"""What is searched: settings, each a choice or a range, and which points of them are allowed."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import Field, PositiveFloat

from steelyard.core.recipe.section import PositiveInt, Section
from steelyard.tune.expression import Expression

Value = bool | int | float | str
Point = dict[str, Any]
MOST_POINTS = 20_000  # A larger grid is drawn from, not walked through.


class Dimension(Section):
    """One setting: `choice = [1, 2, 4]`, or `low` and `high` with `step` or `log`. Whole numbers stay whole."""

    choice: list[Value] | None = Field(None, min_length=1)
    low: int | float | None = None
    high: int | float | None = None
    step: PositiveInt | PositiveFloat | None = None
    log: bool = False

    def problem(self) -> str | None:
        """Why this is no setting that can be searched."""
        if self.choice is not None:
            given = [name for name in ("low", "high", "step") if getattr(self, name) is not None]
            if given or self.log:
                return "a choice has no range beside it"
            written = [json.dumps(value) for value in self.choice]
            return "a value is named twice" if len(set(written)) < len(written) else None
        if self.low is None or self.high is None:
            return "give choice = [...], or low and high"
        if not (math.isfinite(self.low) and math.isfinite(self.high)) or self.low > self.high:
            return f"from {self.low} to {self.high} there is nothing"
        if self.log and self.low <= 0:
            return "a logarithmic range begins above 0"
        if self.log and self.step is not None:
            return "a logarithmic range has no step"
        if self.is_whole and isinstance(self.step, float):
            return "whole numbers have whole steps"
        return None

    @property
    def is_whole(self) -> bool:
        """Whether it is a range of whole numbers."""
        return isinstance(self.low, int) and isinstance(self.high, int)

    def values(self) -> list[Any] | None:
        """All of them, where they can be counted and are few enough."""
        if self.choice is not None:
            return list(self.choice)
        count = self._notches()
        return None if count is None or count > MOST_POINTS else [self._at(number) for number in range(count)]

    def _notches(self) -> int | None:
        """How many values a range has; None for any number between."""
        assert self.low is not None
        assert self.high is not None
        if self.is_whole:
            return (int(self.high) - int(self.low)) // int(self.step or 1) + 1
        if self.step is None:
            return 1 if self.low == self.high else None
        return int((self.high - self.low) / self.step + 1e-9) + 1

    def _at(self, number: int) -> Any:
        """The value at a notch of a range."""
        assert self.low is not None
        return self.low + number * (self.step or 1)

    def drawn(self, chance: random.Random) -> Any:
        """One of them, at random."""
        if self.choice is not None:
            return chance.choice(self.choice)
        count = None if self.log else self._notches()
        if count is not None:
            return self._at(chance.randrange(count))
        assert self.low is not None
        assert self.high is not None
        if not self.log:
            return chance.uniform(self.low, self.high)
        value = math.exp(chance.uniform(math.log(self.low), math.log(self.high)))
        return min(int(self.high), max(int(self.low), round(value))) if self.is_whole else value

    def distribution(self) -> Any:
        """As Optuna has it."""
        from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

        if self.choice is not None:
            return CategoricalDistribution(self.choice)
        assert self.low is not None
        assert self.high is not None
        if self.is_whole:
            last = self._at((self._notches() or 1) - 1)
            return IntDistribution(int(self.low), int(last), log=self.log, step=int(self.step or 1))
        if self.step is not None:
            last = self._at((self._notches() or 1) - 1)
            return FloatDistribution(float(self.low), float(last), step=float(self.step))
        return FloatDistribution(float(self.low), float(self.high), log=self.log)


class Space:
    """Settings by name, and constraints over them. `world` is the number of ranks, which constraints may name too,
    unless every point has ranks of its own."""

    def __init__(
        self, dimensions: dict[str, Dimension], constraints: Sequence[str] = (), world: int | None = 1
    ) -> None:
        self.dimensions, self.world = dimensions, world
        names = {*dimensions, *(["world"] if world is not None else [])}
        self.constraints = [Expression(text, names) for text in constraints]

    def distributions(self) -> dict[str, Any]:
        """As Optuna has them."""
        return {name: dimension.distribution() for name, dimension in self.dimensions.items()}

    def broken(self, point: Point) -> str | None:
        """The first constraint that a point breaks."""
        values = {"world": self.world} | point
        return next((each.text for each in self.constraints if not each.holds(values)), None)

    def grid(self) -> list[Point] | None:
        """Every point that keeps the constraints; None where there are too many to count."""
        values = [dimension.values() for dimension in self.dimensions.values()]
        if any(each is None for each in values) or math.prod(len(each or ()) for each in values) > MOST_POINTS:
            return None
        points = (
            dict(zip(self.dimensions, chosen, strict=True)) for chosen in itertools.product(*(v or () for v in values))
        )
        return [point for point in points if self.broken(point) is None]

    def distance(self, one: Point, other: Point) -> float:
        """How far apart two points are: notches of what can be counted, wholes of what has no order."""
        total = 0.0
        for name, dimension in self.dimensions.items():
            values, first, second = dimension.values(), one[name], other[name]
            is_ordered = not isinstance(first, str | bool)
            if values is not None and is_ordered and first in values and second in values:
                total += abs(values.index(first) - values.index(second))
            elif is_ordered and dimension.low is not None and dimension.high is not None:
                total += 10 * abs(first - second) / max(dimension.high - dimension.low, 1e-12)
            else:
                total += first != second
        return total

    def drawn(self, chance: random.Random, tries: int) -> Iterator[Point]:
        """Random points that keep the constraints, out of so many tries."""
        for _ in range(tries):
            point = {name: dimension.drawn(chance) for name, dimension in self.dimensions.items()}
            if self.broken(point) is None:
                yield point


def key(point: Point) -> str:
    """A point as a word, to tell whether it was tried."""
    return json.dumps(point, sort_keys=True)
