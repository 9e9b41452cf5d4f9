"""A search's answer for a person and for a program: the ranking, and the best plan explained."""

from __future__ import annotations

from dataclasses import asdict
from itertools import groupby
from typing import Any

from steelyard.core import units
from steelyard.core.recipe import Recipe
from steelyard.core.recipe.parallel_section import Partition
from steelyard.plan import memory_fit
from steelyard.plan.cluster import Cluster
from steelyard.plan.layout import Layout
from steelyard.plan.per_stage import StagedPlan
from steelyard.plan.predict import Predictor
from steelyard.plan.results import Found, Plan
from steelyard.plan.software import STEELYARD, Software
from steelyard.plan.tensor_widths import Width

DAY = 86_400


def as_result(
    recipe: Recipe, cluster: Cluster, found: Found, tokens: int, excluded: bool, software: Software = STEELYARD
) -> dict[str, Any]:
    """The answer as one JSON object."""
    predictor = Predictor(recipe, cluster, software)
    result: dict[str, Any] = {
        "recipe": recipe.name,
        "cluster": cluster.name,
        "looked_at": found.looked_at,
        "complete": found.complete,
        "tokens": tokens,
        "plans": [_plan(recipe, plan, tokens) for plan in found.plans],
    }
    if found.plans:
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
    return {**_keys(plan.layout), "parts": asdict(plan.parts), **_figures(recipe, plan, tokens)}


def _figures(recipe: Recipe, plan: Plan | StagedPlan, tokens: int) -> dict[str, Any]:
    step_tokens = recipe.train.global_batch * recipe.data.sequence_length
    days = plan.seconds * tokens / step_tokens / DAY
    return {
        "seconds": plan.seconds,
        "tokens_per_second": step_tokens / plan.seconds,
        "days": days,
        "dollars": None if plan.price_hour is None else days * 24 * plan.price_hour,
        "kilowatt_hours": None if plan.watts is None else days * 24 * plan.watts / 1e3,
    }


def _keys(layout: Layout) -> dict[str, Any]:
    return {**layout.settings(), "micro_batch": layout.micro_batch, "world": layout.world}


def as_text(
    recipe: Recipe, cluster: Cluster, found: Found, tokens: int, excluded: bool, software: Software = STEELYARD
) -> str:
    """The answer as tables."""
    blocks = [_ranking(recipe, found, tokens)]
    if found.plans:
        blocks.append(_explanation(recipe, cluster, found.plans[0], tokens, software))
    if not found.complete:
        blocks.append("the cluster is large: only the most promising meshes were looked at")
    if excluded:
        lines = [f"  {shown(layout)}: {why}" for layout, why in found.excluded[:20]]
        more = len(found.excluded) - 20
        lines += [f"  and {more} more; --json lists them all"] if more > 0 else []
        blocks.append("do not fit, though they might be among the best:\n" + ("\n".join(lines) or "  none"))
    return "\n\n".join(blocks)


def shown(layout: Layout) -> str:
    """A layout in one line."""
    sizes = {"tensor": layout.tensor, "context": layout.context, "pipeline": layout.pipeline, "data": layout.data}
    mesh = " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1) or "one rank"
    schedule = f", {layout.schedule}" if layout.pipeline > 1 else ""
    schedule += f" x {layout.virtual}" if layout.virtual > 1 else ""
    sequence = f", {'' if layout.sequence_parallel else 'no '}sequence parallel" if layout.tensor > 1 else ""
    again = "" if layout.recompute == "none" else f", recompute {layout.recompute}"
    return f"{mesh}{sequence}, micro-batch {layout.micro_batch}, zero {layout.zero}{schedule}{again}"


def _ranking(recipe: Recipe, found: Found, tokens: int) -> str:
    rows = [["", "seconds", "tokens/s", "days", "dollars", "GPUs", "layout", "nodes"]]
    for number, plan in enumerate(found.plans, 1):
        figures = _plan(recipe, plan, tokens)
        dollars = "" if figures["dollars"] is None else f"{figures['dollars']:,.0f}"
        nodes = " ".join(figures["placement"])
        rows.append(
            [str(number), f"{plan.seconds:.3f}", units.count(figures["tokens_per_second"]), _days(figures["days"]),
             dollars,
             str(plan.layout.world), shown(plan.layout), nodes]
        )  # fmt: skip
    return table(rows)


def _days(days: float) -> str:
    return f"{days:.1f}" if days >= 0.1 else units.duration(days * DAY)


def _explanation(recipe: Recipe, cluster: Cluster, plan: Plan, tokens: int, software: Software) -> str:
    layout, parts = plan.layout, asdict(plan.parts)
    lines = [f"the best: {shown(layout)}", f"  layers per stage  {Partition(layout.partition)}"]
    rows = [["a step", "seconds", "share"]]
    rows += [[name, f"{seconds:.4f}", f"{100 * seconds / plan.seconds:.1f}%"] for name, seconds in parts.items()]
    rows.append(["in all", f"{plan.seconds:.4f}", ""])
    rooms = memory_fit.rooms(Predictor(recipe, cluster, software), layout)
    shown_rooms = rooms if len(rooms) <= 8 else [*rooms[:4], *rooms[-4:]]
    memory = [["memory of a rank", *(f"pipeline {room.rank}" for room in shown_rooms)]]
    for kind in rooms[0].memory.by_kind():
        memory.append([kind.replace("_", " "), *(units.size(room.memory.by_kind()[kind]) for room in shown_rooms)])
    memory.append(["in all", *(units.size(room.memory.total) for room in shown_rooms)])
    memory.append(["its GPU has", *(units.size(room.usable) for room in shown_rooms)])
    if any(room.host for room in rooms):
        memory.append(["of the node's memory", *(units.size(room.host) for room in shown_rooms)])
        has = [room.host_usable for room in shown_rooms]
        memory.append(["a node has", *("not told" if size is None else units.size(size) for size in has)])
    figures = _plan(recipe, plan, tokens)
    budget = f"{units.count(tokens)} tokens take {_days(figures['days'])}" + (" days" if figures["days"] >= 0.1 else "")
    budget += "" if figures["dollars"] is None else f" and {figures['dollars']:,.0f} dollars"
    budget += f", {figures['kilowatt_hours']:,.0f} kWh at full power" if plan.watts else ""
    return "\n".join(lines) + "\n\n" + table(rows) + "\n\n" + table(memory) + "\n\n" + budget


def staged_result(recipe: Recipe, plans: list[StagedPlan], tokens: int) -> list[dict[str, Any]]:
    """Plans of unlike stages for a program."""
    return [
        {
            "runnable": False,
            "stages": [{**asdict(width), "layers": layers} for width, layers in _stages(plan)],
            **{key: plan.layout.base.settings()[key] for key in ("schedule", "zero", "recompute", "placement")},
            "world": plan.layout.world,
            "parts": asdict(plan.parts),
            **_figures(recipe, plan, tokens),
        }
        for plan in plans
    ]


def staged_text(plans: list[StagedPlan], best: float) -> str:
    """The same as a table; `best` is the seconds of the best plan that the engine runs."""
    title = "stages of unlike widths, not runnable by steelyard train, which has one mesh for all stages:"
    if not plans:
        return f"{title} none fits, or all nodes are of one type"
    rows = [["", "seconds", "to the best", "GPUs", "stages along the pipeline", "nodes"]]
    for number, plan in enumerate(plans, 1):
        groups = [
            f"{len(list(same))} x (tensor {width.tensor}, data {width.data}, micro-batch {width.micro_batch})"
            for width, same in groupby(plan.layout.widths)
        ]
        nodes = " ".join(plan.layout.base.settings()["placement"])
        change = f"{100 * (plan.seconds / best - 1):+.1f}%"
        rows.append([str(number), f"{plan.seconds:.3f}", change, str(plan.layout.world), ", then ".join(groups), nodes])
    partition = Partition(plans[0].layout.base.partition)
    return f"{title}\n\n{table(rows)}\n\n  layers per stage of the first  {partition}"


def _stages(plan: StagedPlan) -> list[tuple[Width, int]]:
    return list(zip(plan.layout.widths, plan.layout.base.partition, strict=True))


def table(rows: list[list[str]]) -> str:
    """Rows as lines with their columns aligned."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
