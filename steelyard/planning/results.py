"""Plans and what a search returns: layouts with predicted time, price and power, and those that do not fit."""

from __future__ import annotations

from dataclasses import dataclass, field

from steelyard.planning import memory_fit
from steelyard.planning.cost_table import Parts
from steelyard.planning.layout import Layout
from steelyard.planning.predict import Predictor
from steelyard.planning.uncertainty import Range, range_of


def weight(objective: str, price_hour: float | None, watts: float | None) -> float:
    """The value of one second of a step for an objective: 1 for time, dollars for cost, joules for energy."""
    if objective == "cost":
        return (price_hour or 0.0) / 3600
    return (watts or 0.0) if objective == "energy" else 1.0


@dataclass(frozen=True)
class Plan:
    """A layout with its predicted step time, price and power."""

    layout: Layout
    parts: Parts
    price_hour: float | None
    watts: float | None
    range: Range
    """The 80% range of the step time."""

    @property
    def seconds(self) -> float:
        """The time of a step."""
        return self.parts.total

    def value(self, objective: str) -> float:
        """The number that the objective minimizes."""
        return self.seconds * weight(objective, self.price_hour, self.watts)

    def range_of_value(self, objective: str) -> Range:
        """The 80% range of that number."""
        return self.range.scaled(weight(objective, self.price_hour, self.watts))

    def ties_with(self, best: Plan, objective: str) -> bool:
        """Whether the ranges of what the objective minimizes overlap, so that runs may order the two differently."""
        return self.range_of_value(objective).overlaps(best.range_of_value(objective))


def plan_of(predictor: Predictor, layout: Layout) -> Plan:
    """A layout with its prediction."""
    cluster, step = predictor.cluster, predictor.step(layout)
    parts = step.parts(layout.partition)
    price, watts = cluster.price_hour(layout.placement), cluster.watts(layout.placement)
    return Plan(layout, parts, price, watts, range_of(cluster, predictor.profiles, layout, parts, step.host_share()))


@dataclass
class SearchResult:
    """The plans that a search found, and how much it evaluated."""

    plans: list[Plan]
    excluded: list[tuple[Layout, str]] = field(default_factory=list)
    """Layouts that might be among the best but do not fit, with the reason."""
    looked_at: int = 0
    """Layouts whose memory or time was computed."""
    space: int = 0
    """Layouts that these represent."""
    complete: bool = True
    """Whether no layout that might be better was skipped."""
    nearest: tuple[int, Layout, str] | None = None
    """Of the layouts that do not fit, the one that lacks the fewest bytes, and the reason."""

    def exclude(self, layout: Layout, rooms: list[memory_fit.Room]) -> None:
        """Record a layout that does not fit."""
        why, lacks = memory_fit.reason(rooms) or "", memory_fit.lacking(rooms)
        self.excluded.append((layout, why))
        if self.nearest is None or lacks < self.nearest[0]:
            self.nearest = (lacks, layout, why)
