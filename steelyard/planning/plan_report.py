"""The result of a search as text tables and as JSON, the two forms that `steelyard plan` prints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from steelyard.core import units
from steelyard.core.recipe import Recipe
from steelyard.core.recipe.parallel_section import Partition
from steelyard.planning import assumptions, memory_fit
from steelyard.planning.assumptions import IdleNodes
from steelyard.planning.cluster import Cluster
from steelyard.planning.layout import Layout
from steelyard.planning.predict import Predictor
from steelyard.planning.results import Plan, SearchResult
from steelyard.planning.software import STEELYARD, Software
from steelyard.sizes.param_count import described, parameters

if TYPE_CHECKING:
    from steelyard.planning.measured_layers import Profile

DAY = 86_400
EVIDENCE = {
    "measured": "its layers or ranks are measured on this GPU",
    "calibrated": "the model is calibrated on published runs",
    "extrapolated": "the rate of a GPU is extrapolated",
    "default": "a link is assumed: the cluster file does not give it",
}
UNITS = {"time": "seconds", "cost": "dollars", "energy": "kWh"}  # of what an objective minimizes


@dataclass(frozen=True)
class PlanRequest:
    """What `steelyard plan` was asked for."""

    recipe: Recipe
    cluster: Cluster
    tokens: int
    objective: str = "time"
    software: Software = STEELYARD
    profiles: Sequence[Profile] = ()
    imbalance: float = 1.0
    given: bool = False
    """Whether the recipe's own layout is predicted, without a search."""
    excluded: bool = False

    def predictor(self, layout: Layout) -> Predictor:
        """What predicts a layout."""
        return Predictor.of_layout(self.recipe, self.cluster, layout, self.software, self.profiles, self.imbalance)

    @property
    def steps(self) -> float:
        """Steps of the token budget."""
        return self.tokens / self.step_tokens

    @property
    def step_tokens(self) -> int:
        """Tokens of a step."""
        return self.recipe.train.global_batch * self.recipe.data.sequence_length


def as_result(request: PlanRequest, found: SearchResult) -> dict[str, Any]:
    """The result as a JSON object."""
    size, ties = parameters(request.recipe.model), _ties(request.objective, found.plans)
    result: dict[str, Any] = {
        "recipe": request.recipe.name,
        "parameters": size.total,
        "active_parameters": size.active,
        "cluster": request.cluster.name,
        "objective": request.objective,
        "looked_at": found.looked_at,
        "complete": found.complete,
        "tokens": request.tokens,
        "plans": [
            _plan(request, plan) | {name: tied[number] for name, tied in ties.items()}
            for number, plan in enumerate(found.plans)
        ],
    }
    if found.plans:
        best = found.plans[0].layout
        predictor = request.predictor(best)
        result["assumptions"] = [asdict(each) for each in assumptions.assumptions(predictor, best, not request.given)]
        result["idle_nodes"] = [asdict(each) for each in _idle_nodes(request, found)]
        result["memory"] = [
            {"pipeline_rank": room.rank, "gpu": room.gpu, "bytes": room.memory.by_kind(),
             "total_bytes": room.memory.total, "usable_bytes": room.usable, "host_bytes": room.host}
            for room in memory_fit.rooms(predictor, best)
        ]  # fmt: skip
    if request.excluded:
        result["excluded"] = [{**_keys(layout), "why": why} for layout, why in found.excluded]
    return result


def figures(request: PlanRequest, plan: Plan) -> dict[str, float | None]:
    """Seconds of a step, and days, dollars and kilowatt-hours of the token budget."""
    days = plan.seconds * request.steps / DAY
    return {
        "seconds": plan.seconds,
        "days": days,
        "dollars": None if plan.price_hour is None else days * 24 * plan.price_hour,
        "kilowatt_hours": None if plan.watts is None else days * 24 * plan.watts / 1e3,
    }


def _plan(request: PlanRequest, plan: Plan) -> dict[str, Any]:
    """A plan with its figures and their 80% ranges, which all have the relative width of the step's."""
    found: dict[str, Any] = {**_keys(plan.layout), "parts": asdict(plan.parts), "evidence": plan.range.evidence}
    found["tokens_per_second"] = request.step_tokens / plan.seconds
    for name, value in figures(request, plan).items():
        range_ = None if value is None else plan.range.scaled(value / plan.seconds)
        found |= {name: value, f"{name}_low": range_ and range_.low, f"{name}_high": range_ and range_.high}
    return found


def _ties(objective: str, plans: Sequence[Plan]) -> dict[str, list[bool]]:
    """Whether each plan ties with the best one; a Pareto frontier has a fastest plan and a cheapest one instead."""
    if not plans:
        return {}
    ends = {"ties_with_best": (plans[0], objective)}
    if objective == "pareto":
        ends = {"ties_with_fastest": (plans[0], "time"), "ties_with_cheapest": (plans[-1], "cost")}
    return {name: [plan is not end and plan.ties_with(end, by) for plan in plans] for name, (end, by) in ends.items()}


def _keys(layout: Layout) -> dict[str, Any]:
    return {**layout.settings(), "micro_batch": layout.micro_batch, "world": layout.world}


def as_text(request: PlanRequest, found: SearchResult) -> str:
    """The result as text tables."""
    blocks = [_ranking(request, found)]
    if found.plans:
        blocks.append(_explanation(request, found.plans[0]))
        blocks.append(_doubts(request, found))
    if not found.complete:
        blocks.append(found.incomplete)
    if request.excluded:
        lines = [f"  {shown(layout)}: {why}" for layout, why in found.excluded[:20]]
        more = len(found.excluded) - 20
        lines += [f"  and {more} more; --json lists all of them"] if more > 0 else []
        blocks.append("layouts that might be among the best but do not fit:\n" + ("\n".join(lines) or "  none"))
    return "\n\n".join(blocks)


def shown(layout: Layout) -> str:
    """A layout as one line of text."""
    sizes = {"tensor": layout.tensor, "context": layout.context, "pipeline": layout.pipeline, "data": layout.data}
    sizes["expert"] = layout.expert
    mesh = " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1) or "one rank"
    schedule = f", {layout.schedule}" if layout.pipeline > 1 else ""
    schedule += f" x {layout.virtual}" if layout.virtual > 1 else ""
    sequence = f", {'' if layout.sequence_parallel else 'no '}sequence parallel" if layout.tensor > 1 else ""
    again = "" if layout.recompute == "none" else f", recompute {layout.recompute}"
    return f"{mesh}{sequence}, micro-batch {layout.micro_batch}, zero {layout.zero}{schedule}{again}"


def _ranking(request: PlanRequest, found: SearchResult) -> str:
    """One row per plan. What the objective minimizes has a column with its range."""
    by_energy, by_price = request.objective == "energy", request.objective in ("cost", "pareto")
    head = ["", "seconds", "80% range", "tokens/s", "days", "dollars", *(["80% range"] if by_price else [])]
    rows = [[*head, *(["kWh", "80% range"] if by_energy else []), "GPUs", "layout", "nodes"]]
    for number, plan in enumerate(found.plans, 1):
        amounts = figures(request, plan)
        row = [str(number), f"{plan.seconds:.3f}", str(plan.range), units.count(request.step_tokens / plan.seconds)]
        row += [_days(amounts["days"] or 0.0), "" if amounts["dollars"] is None else f"{amounts['dollars']:,.0f}"]
        row += [_range(plan, amounts["dollars"])] if by_price else []
        row += [f"{amounts['kilowatt_hours']:,.3g}", _range(plan, amounts["kilowatt_hours"])] if by_energy else []
        rows.append([*row, str(plan.layout.world), shown(plan.layout), " ".join(_keys(plan.layout)["placement"])])
    return "\n\n".join([table(rows), *_tie_notes(request.objective, found.plans)])


def _range(plan: Plan, value: float | None) -> str:
    """The 80% range of a figure of a plan."""
    return "" if value is None else str(plan.range.scaled(value / plan.seconds))


def _tie_notes(objective: str, plans: Sequence[Plan]) -> list[str]:
    notes = []
    for name, ties in _ties(objective, plans).items():
        numbers = [str(number) for number, tied in enumerate(ties, 1) if tied]
        if not numbers:
            continue
        if name == "ties_with_best":
            which = f"plans 1, {', '.join(numbers)} are ties"
            notes.append(f"{which}: their ranges of {UNITS[objective]} overlap, so runs may order them differently")
        elif name == "ties_with_fastest":
            notes.append(f"may be as fast as plan 1, because the ranges of seconds overlap: {', '.join(numbers)}")
        else:
            last = len(plans)
            notes.append(f"may be as cheap as plan {last}, because the ranges of dollars overlap: {', '.join(numbers)}")
    return notes


def _doubts(request: PlanRequest, found: SearchResult) -> str:
    """What the prediction rests on: its evidence, every default, and the nodes that stay idle."""
    best = found.plans[0]
    listed = assumptions.assumptions(request.predictor(best.layout), best.layout, not request.given)
    lines = [f"the best plan takes {best.range} s in four of five cases ({EVIDENCE[best.range.evidence]})"]
    lines += [f"  {each}" for each in assumptions.as_lines(listed)]
    lines += [f"  idle: {each.count} {each.type} ({each.why})" for each in _idle_nodes(request, found)]
    return "\n".join(lines)


def _idle_nodes(request: PlanRequest, found: SearchResult) -> list[IdleNodes]:
    """The idle nodes of the best plan. Only a complete search knows that no plan with them is better."""
    unused = "no better plan uses them"
    if request.given:
        unused = "the layout of the recipe does not use them; without --given a search tries them"
    elif not found.complete:
        unused = "no plan with them was better among those that the search tried; it did not try all"
    precision = request.recipe.train.precision
    return assumptions.idle_nodes(request.cluster, found.plans[0].layout, precision, unused)


def _days(days: float) -> str:
    return f"{days:.1f}" if days >= 0.1 else units.duration(days * DAY)


def _explanation(request: PlanRequest, plan: Plan) -> str:
    model, layout, parts = request.recipe.model, plan.layout, asdict(plan.parts)
    if not model.blocks.has_experts:
        del parts["expert"]
    lines = [f"best plan: {shown(layout)}", f"  layers per stage  {Partition(layout.partition)}"]
    lines.append(f"  parameters        {described(model)}")
    rows = [["part of a step", "seconds", "share"]]
    rows += [[name, f"{seconds:.4f}", f"{100 * seconds / plan.seconds:.1f}%"] for name, seconds in parts.items()]
    rows.append(["total", f"{plan.seconds:.4f}", ""])
    return "\n\n".join(["\n".join(lines), table(rows), _memory(request, layout), _budget(request, plan)])


def _memory(request: PlanRequest, layout: Layout) -> str:
    rooms = memory_fit.rooms(request.predictor(layout), layout)
    shown_rooms = rooms if len(rooms) <= 8 else [*rooms[:4], *rooms[-4:]]
    memory = [["memory per rank", *(f"pipeline {room.rank}" for room in shown_rooms)]]
    for kind in rooms[0].memory.by_kind():
        memory.append([kind.replace("_", " "), *(units.size(room.memory.by_kind()[kind]) for room in shown_rooms)])
    memory.append(["total", *(units.size(room.memory.total) for room in shown_rooms)])
    memory.append(["GPU memory for tensors", *(units.size(room.usable) for room in shown_rooms)])
    if any(room.host for room in rooms):
        memory.append(["host memory per node", *(units.size(room.host) for room in shown_rooms)])
        has = [room.host_usable for room in shown_rooms]
        memory.append(["available per node", *("unknown" if size is None else units.size(size) for size in has)])
    return table(memory)


def _budget(request: PlanRequest, plan: Plan) -> str:
    """What the token budget takes, with 80% ranges."""
    amounts = figures(request, plan)
    days = amounts["days"] or 0.0
    if days >= 0.1:
        took = f"{days:,.2f} days ({_range(plan, days)})"
    else:
        ends = [units.duration(days * DAY * end / plan.seconds) for end in (plan.range.low, plan.range.high)]
        took = f"{units.duration(days * DAY)} ({' to '.join(ends)})"
    text = f"{units.count(request.tokens)} tokens take {took}"
    if amounts["dollars"] is not None:
        text += f" and {amounts['dollars']:,.0f} dollars ({_range(plan, amounts['dollars'])})"
    if plan.watts:
        text += f", {amounts['kilowatt_hours']:,.0f} kWh at full power ({_range(plan, amounts['kilowatt_hours'])})"
    return text


def table(rows: list[list[str]]) -> str:
    """Rows as text with aligned columns."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
