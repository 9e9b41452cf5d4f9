"""What a search brings back: plans that fit, and what it looked at to find them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

from steelyard.plan.layout import Layout
from steelyard.plan.pricing import weight
from steelyard.plan.step import Parts

L = TypeVar("L")


@dataclass(frozen=True)
class Planned(Generic[L]):
    """A layout that fits, with its prediction."""

    layout: L
    parts: Parts
    price_hour: float | None
    watts: float | None

    @property
    def seconds(self) -> float:
        """Of a step."""
        return self.parts.total

    def value(self, objective: str) -> float:
        """What the objective makes smaller."""
        return self.seconds * weight(objective, self.price_hour, self.watts)


Plan = Planned[Layout]


@dataclass
class Found:
    """What a search brings back."""

    plans: list[Plan]
    excluded: list[tuple[Layout, str]] = field(default_factory=list)
    """Layouts that would have been among the best and do not fit, with the reason."""
    looked_at: int = 0
    """Whole layouts whose memory or time was reckoned."""
    space: int = 0
    """Layouts that those stand for."""
    complete: bool = True
    """Whether nothing that might be better was left out."""
