"""The result of a search in the three forms that `steelyard plan` writes: text tables, JSON, and HTML pages.

The HTML pages are the timeline of a plan's pipeline (`--explain`) and the Pareto frontier of time and price
(`--pareto`). Each is one file that needs no network.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from steelyard.core import units
from steelyard.core.recipe import Recipe
from steelyard.core.recipe.parallel_section import Partition
from steelyard.planning import memory_fit, pipeline_sim, uncertainty
from steelyard.planning.cluster import Cluster
from steelyard.planning.layout import Layout
from steelyard.planning.predict import Predictor
from steelyard.planning.results import Plan, SearchResult
from steelyard.planning.software import STEELYARD, Software
from steelyard.sizes.param_count import described, parameters

if TYPE_CHECKING:
    from steelyard.planning.measured_layers import Profile

DAY = 86_400
COLOURS = {"forward": "#4c78a8", "backward": "#f58518", "weights": "#54a24b"}
EVIDENCE = {
    "measured": "its layers or ranks are measured on this GPU",
    "calibrated": "the model is calibrated on published runs",
    "extrapolated": "the rate of a GPU is extrapolated",
    "default": "a link is assumed: the cluster file does not give it",
}
MOST = 4000  # Passes drawn in a pipeline timeline; a longer step is cut off.


def as_result(
    recipe: Recipe, cluster: Cluster, found: SearchResult, tokens: int, excluded: bool, software: Software = STEELYARD
) -> dict[str, Any]:
    """The result as a JSON object."""
    predictor = Predictor(recipe, cluster, software)
    size = parameters(recipe.model)
    result: dict[str, Any] = {
        "recipe": recipe.name,
        "parameters": size.total,
        "active_parameters": size.active,
        "cluster": cluster.name,
        "looked_at": found.looked_at,
        "complete": found.complete,
        "tokens": tokens,
        "plans": [_plan(recipe, plan, tokens) | _certainty(plan, found.plans[0]) for plan in found.plans],
    }
    if found.plans:
        best = found.plans[0].layout
        result["assumptions"] = uncertainty.assumptions(cluster, best)
        result["idle_nodes"] = [asdict(each) for each in uncertainty.idle_nodes(cluster, best, recipe.train.precision)]
        rooms = memory_fit.rooms(predictor, found.plans[0].layout)
        result["memory"] = [
            {"pipeline_rank": room.rank, "gpu": room.gpu, "bytes": room.memory.by_kind(),
             "total_bytes": room.memory.total, "usable_bytes": room.usable, "host_bytes": room.host}
            for room in rooms
        ]  # fmt: skip
    if excluded:
        result["excluded"] = [{**_keys(layout), "why": why} for layout, why in found.excluded]
    return result


def _plan(recipe: Recipe, plan: Plan, tokens: int) -> dict[str, Any]:
    step_tokens = recipe.train.global_batch * recipe.data.sequence_length
    days = plan.seconds * tokens / step_tokens / DAY
    return {
        **_keys(plan.layout),
        "parts": asdict(plan.parts),
        "seconds": plan.seconds,
        "tokens_per_second": step_tokens / plan.seconds,
        "days": days,
        "dollars": None if plan.price_hour is None else days * 24 * plan.price_hour,
        "kilowatt_hours": None if plan.watts is None else days * 24 * plan.watts / 1e3,
    }


def _certainty(plan: Plan, best: Plan) -> dict[str, Any]:
    """The 80% range of a plan, what it rests on, and whether the best plan may be no faster."""
    found = plan.range
    tie = plan is not best and found.overlaps(best.range)
    return {"seconds_low": found.low, "seconds_high": found.high, "evidence": found.evidence, "ties_with_best": tie}


def _keys(layout: Layout) -> dict[str, Any]:
    return {**layout.settings(), "micro_batch": layout.micro_batch, "world": layout.world}


def as_text(
    recipe: Recipe, cluster: Cluster, found: SearchResult, tokens: int, excluded: bool, software: Software = STEELYARD
) -> str:
    """The result as text tables."""
    blocks = [_ranking(recipe, found, tokens)]
    if found.plans:
        blocks.append(_explanation(recipe, cluster, found.plans[0], tokens, software))
        blocks.append(_doubts(recipe, cluster, found.plans[0]))
    if not found.complete:
        blocks.append(found.incomplete)
    if excluded:
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


def _ranking(recipe: Recipe, found: SearchResult, tokens: int) -> str:
    rows = [["", "seconds", "80% range", "tokens/s", "days", "dollars", "GPUs", "layout", "nodes"]]
    for number, plan in enumerate(found.plans, 1):
        figures = _plan(recipe, plan, tokens)
        dollars = "" if figures["dollars"] is None else f"{figures['dollars']:,.0f}"
        nodes = " ".join(figures["placement"])
        rows.append(
            [str(number), f"{plan.seconds:.3f}", str(plan.range),
             units.count(figures["tokens_per_second"]), _days(figures["days"]), dollars,
             str(plan.layout.world), shown(plan.layout), nodes]
        )  # fmt: skip
    ties = [str(number) for number, plan in enumerate(found.plans, 1) if plan.range.overlaps(found.plans[0].range)]
    note = f"plans {', '.join(ties)} are ties: their ranges overlap, so runs may order them differently"
    return table(rows) + (f"\n\n{note}" if len(ties) > 1 else "")


def _doubts(recipe: Recipe, cluster: Cluster, plan: Plan) -> str:
    """What the prediction rests on: its evidence, every default, and the nodes that stay idle."""
    idle = uncertainty.idle_nodes(cluster, plan.layout, recipe.train.precision)
    lines = [f"the best plan takes {plan.range} s in four of five cases "
             f"({EVIDENCE[plan.range.evidence]})"]  # fmt: skip
    lines += [f"  assumed: {each}" for each in uncertainty.assumptions(cluster, plan.layout)]
    lines += [f"  idle: {each.count} {each.type} ({each.why})" for each in idle]
    return "\n".join(lines)


def _days(days: float) -> str:
    return f"{days:.1f}" if days >= 0.1 else units.duration(days * DAY)


def _explanation(recipe: Recipe, cluster: Cluster, plan: Plan, tokens: int, software: Software) -> str:
    layout, parts = plan.layout, asdict(plan.parts)
    if not recipe.model.blocks.has_experts:
        del parts["expert"]
    lines = [f"best plan: {shown(layout)}", f"  layers per stage  {Partition(layout.partition)}"]
    lines.append(f"  parameters        {described(recipe.model)}")
    rows = [["part of a step", "seconds", "share"]]
    rows += [[name, f"{seconds:.4f}", f"{100 * seconds / plan.seconds:.1f}%"] for name, seconds in parts.items()]
    rows.append(["total", f"{plan.seconds:.4f}", ""])
    rooms = memory_fit.rooms(Predictor(recipe, cluster, software), layout)
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
    figures = _plan(recipe, plan, tokens)
    budget = f"{units.count(tokens)} tokens take {_days(figures['days'])}" + (" days" if figures["days"] >= 0.1 else "")
    budget += "" if figures["dollars"] is None else f" and {figures['dollars']:,.0f} dollars"
    budget += f", {figures['kilowatt_hours']:,.0f} kWh at full power" if plan.watts else ""
    return "\n".join(lines) + "\n\n" + table(rows) + "\n\n" + table(memory) + "\n\n" + budget


def table(rows: list[list[str]]) -> str:
    """Rows as text with aligned columns."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def pipeline(
    recipe: Recipe,
    cluster: Cluster,
    plan: Plan,
    software: Software = STEELYARD,
    profiles: Sequence[Profile] = (),
    imbalance: float = 1.0,
) -> str:
    """An HTML page with the timeline of a step: the passes of each pipeline rank as SVG bars."""
    from steelyard.core.pages import page

    layout = plan.layout
    step = Predictor.of_layout(recipe, cluster, layout, software, profiles, imbalance).step(layout)
    events = pipeline_sim.events(step.times(layout.partition), *step.plan)
    end = max(event[5] for event in sorted(events, key=lambda event: event[4])[:MOST])
    bars = []
    for rank, kind, stage, micro_batch, start, stop in events:
        if start > end:
            continue
        title = f"{kind} of micro-batch {micro_batch}, stage {stage}: {1e3 * start:.2f} to {1e3 * stop:.2f} ms"
        bars.append(
            f'<rect x="{100 + 1000 * start / end:.2f}" y="{20 + 24 * rank}" width="{1000 * (stop - start) / end:.2f}" '
            f'height="20" fill="{COLOURS[kind]}" stroke="var(--paper)" stroke-width=".4"><title>{title}</title></rect>'
        )
    names = [
        f'<text x="94" y="{34 + 24 * rank}" text-anchor="end">rank {rank}</text>' for rank in range(layout.pipeline)
    ]
    legend = " ".join(f'<span style="color:{colour}">&#9632; {kind}</span>' for kind, colour in COLOURS.items())
    nodes = html.escape(" ".join(layout.settings()["placement"]))
    body = [
        f"<p>{html.escape(shown(layout))}; nodes in rank order: {nodes}; layers per stage "
        f"{layout.settings()['partition']}</p><p>{legend}; {1e3 * end:.1f} ms from left to right</p>",
        f"<svg viewBox='0 0 1110 {40 + 24 * layout.pipeline}' width='100%' font-size='11' fill='currentColor'>"
        f"{''.join(names)}{''.join(bars)}</svg>",
        f"<h2>Step time {plan.seconds:.4f} s</h2>",
        page.pairs({name: f"{seconds:.4f} s" for name, seconds in vars(plan.parts).items()}),
    ]
    return page.page(recipe.name, body)


def frontier(recipe: Recipe, plans: list[Plan], tokens: int) -> str:
    """An HTML page with days against dollars for the plans of the Pareto frontier."""
    from steelyard.core.pages import charts, page

    steps = tokens / (recipe.train.global_batch * recipe.data.sequence_length)
    days = [plan.seconds * steps / DAY for plan in plans]
    dollars = [day * 24 * (plan.price_hour or 0.0) for day, plan in zip(days, plans, strict=True)]
    texts = [f"{shown(plan.layout)}\n{' '.join(plan.layout.settings()['placement'])}" for plan in plans]
    line = charts.Line("Pareto frontier", days, dollars, marks="too", texts=texts)
    chart = charts.lines([line], "days", "dollars", points=True, height=520)
    return page.page(f"{recipe.name}: {tokens:,} tokens", [chart], charts.SCRIPTS)
