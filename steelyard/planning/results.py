"""Plans and what a search returns: layouts with predicted time, price and power, and those that do not fit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

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


def ranked(plans: Sequence[Plan], objective: str, top: int) -> list[Plan]:
    """The best plan of each mesh on a set of nodes, the best `top` first; for `pareto`, the frontier, fastest first."""
    best: dict[tuple[object, ...], Plan] = {}
    for plan in sorted(plans, key=lambda plan: plan.value(objective)):
        best.setdefault(_mesh(plan.layout), plan)
    if objective != "pareto":
        return list(best.values())[:top]
    chosen: list[Plan] = []
    least = inf
    for plan in sorted(best.values(), key=lambda plan: (plan.seconds, plan.value("cost"))):
        if plan.value("cost") < least * (1 - 1e-9):
            chosen.append(plan)
            least = plan.value("cost")
    return chosen


def _mesh(layout: Layout) -> tuple[object, ...]:
    nodes: Counter[str] = Counter()
    for type_, count in layout.placement:
        nodes[type_] += count
    degrees = (layout.tensor, layout.context, layout.micro_batch, layout.pipeline, layout.data, layout.expert)
    return (frozenset(nodes.items()), *degrees)


def limit(plans: Sequence[Plan], objective: str, price_hour: float | None, watts: float | None) -> float:
    """Seconds that a step on such nodes must be below to be better than the best plan, or part of the frontier."""
    if objective != "pareto":
        best = plans[:1]
        return min(
            (_seconds(plan.value(objective), weight(objective, price_hour, watts)) for plan in best), default=inf
        )
    each = weight("cost", price_hour, watts)
    return min((max(plan.seconds, _seconds(plan.value("cost"), each)) for plan in plans), default=inf)


def _seconds(value: float, weight: float) -> float:
    return value / weight if weight else (inf if value else 0.0)


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
    incomplete: str = ""
    """Why layouts that might be better than the best plan were skipped; empty if none was."""
    nearest: tuple[int, Layout, str] | None = None
    """Of the layouts that do not fit, the one that lacks the fewest bytes, and the reason."""

    @property
    def complete(self) -> bool:
        """Whether no layout that might be better than the best plan was skipped."""
        return not self.incomplete

    def exclude(self, layout: Layout, rooms: list[memory_fit.Room]) -> None:
        """Record a layout that does not fit."""
        why, lacks = memory_fit.reason(rooms) or "", memory_fit.lacking(rooms)
        self.excluded.append((layout, why))
        if self.nearest is None or lacks < self.nearest[0]:
            self.nearest = (lacks, layout, why)
