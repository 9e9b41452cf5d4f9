"""The search space: settings, each a choice or a range, and constraints on their points."""

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
MOST_POINTS = 20_000  # A larger grid is sampled instead of enumerated.


class Dimension(Section):
    """One setting: `choice = [1, 2, 4]`, or `low` and `high` with `step` or `log`. Integers stay integers."""

    choice: list[Value] | None = Field(None, min_length=1)
    low: int | float | None = None
    high: int | float | None = None
    step: PositiveInt | PositiveFloat | None = None
    log: bool = False

    def problem(self) -> str | None:
        """Why this is not a valid setting; None if it is."""
        if self.choice is not None:
            given = [name for name in ("low", "high", "step") if getattr(self, name) is not None]
            if given or self.log:
                return "choice cannot be combined with low, high, step or log"
            written = [json.dumps(value) for value in self.choice]
            return "a value occurs twice" if len(set(written)) < len(written) else None
        if self.low is None or self.high is None:
            return "set choice = [...], or low and high"
        if not (math.isfinite(self.low) and math.isfinite(self.high)) or self.low > self.high:
            return f"the range from {self.low} to {self.high} is empty"
        if self.log and self.low <= 0:
            return "a logarithmic range must start above 0"
        if self.log and self.step is not None:
            return "a logarithmic range cannot have a step"
        if self.is_whole and isinstance(self.step, float):
            return "a range of integers needs an integer step"
        return None

    @property
    def is_whole(self) -> bool:
        """Whether it is a range of integers."""
        return isinstance(self.low, int) and isinstance(self.high, int)

    def values(self) -> list[Any] | None:
        """All values; None if they are continuous or too many."""
        if self.choice is not None:
            return list(self.choice)
        count = self._count()
        return None if count is None or count > MOST_POINTS else [self._at(number) for number in range(count)]

    def _count(self) -> int | None:
        """Number of values of a range; None if it is continuous."""
        assert self.low is not None
        assert self.high is not None
        if self.is_whole:
            return (int(self.high) - int(self.low)) // int(self.step or 1) + 1
        if self.step is None:
            return 1 if self.low == self.high else None
        return int((self.high - self.low) / self.step + 1e-9) + 1

    def _at(self, number: int) -> Any:
        """The value at an index of a range."""
        assert self.low is not None
        return self.low + number * (self.step or 1)

    def drawn(self, chance: random.Random) -> Any:
        """A random value."""
        if self.choice is not None:
            return chance.choice(self.choice)
        count = None if self.log else self._count()
        if count is not None:
            return self._at(chance.randrange(count))
        assert self.low is not None
        assert self.high is not None
        if not self.log:
            return chance.uniform(self.low, self.high)
        value = math.exp(chance.uniform(math.log(self.low), math.log(self.high)))
        return min(int(self.high), max(int(self.low), round(value))) if self.is_whole else value

    def distribution(self) -> Any:
        """The Optuna distribution."""
        from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

        if self.choice is not None:
            return CategoricalDistribution(self.choice)
        assert self.low is not None
        assert self.high is not None
        if self.is_whole:
            last = self._at((self._count() or 1) - 1)
            return IntDistribution(int(self.low), int(last), log=self.log, step=int(self.step or 1))
        if self.step is not None:
            last = self._at((self._count() or 1) - 1)
            return FloatDistribution(float(self.low), float(last), step=float(self.step))
        return FloatDistribution(float(self.low), float(self.high), log=self.log)


class Space:
    """Settings by name, with constraints. Constraints can also use `world`, the number of ranks, unless it differs
    between points."""

    def __init__(
        self, dimensions: dict[str, Dimension], constraints: Sequence[str] = (), world: int | None = 1
    ) -> None:
        self.dimensions, self.world = dimensions, world
        names = {*dimensions, *(["world"] if world is not None else [])}
        self.constraints = [Expression(text, names) for text in constraints]

    def distributions(self) -> dict[str, Any]:
        """The Optuna distributions by name."""
        return {name: dimension.distribution() for name, dimension in self.dimensions.items()}

    def broken(self, point: Point) -> str | None:
        """The first constraint that a point violates, or None."""
        values = {"world": self.world} | point
        return next((each.text for each in self.constraints if not each.holds(values)), None)

    def grid(self) -> list[Point] | None:
        """All points that satisfy the constraints; None if there are too many."""
        values = [dimension.values() for dimension in self.dimensions.values()]
        if any(each is None for each in values) or math.prod(len(each or ()) for each in values) > MOST_POINTS:
            return None
        points = (
            dict(zip(self.dimensions, chosen, strict=True)) for chosen in itertools.product(*(v or () for v in values))
        )
        return [point for point in points if self.broken(point) is None]

    def distance(self, one: Point, other: Point) -> float:
        """Distance of two points: index differences of discrete settings, 1 for different unordered values."""
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
        """Random points that satisfy the constraints, out of `tries` draws."""
        for _ in range(tries):
            point = {name: dimension.drawn(chance) for name, dimension in self.dimensions.items()}
            if self.broken(point) is None:
                yield point


def key(point: Point) -> str:
    """A point as a string, to look up whether it was tried."""
    return json.dumps(point, sort_keys=True)
