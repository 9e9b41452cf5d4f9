"""The report sections of a timeline: the timeline itself, and the pipeline's bubble and balance."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from steelyard.core.pages import charts, page
from steelyard.core.pages.charts import Bar
from steelyard.core.run import Run
from steelyard.core.safe_parse import read_object
from steelyard.observe import pipeline_balance, run_cluster, spans
from steelyard.observe.pipeline_balance import Balance
from steelyard.observe.report.timeline_data import pack
from steelyard.observe.run_files import listed
from steelyard.observe.spans import KINDS, UNKNOWN, Spans

Sections = dict[str, tuple[str, list[str]]]
HOW_TO_RECORD = "The run has no timeline. To record steps 10 to 12, set log.timeline = [10, 12] in the recipe."


def pipeline_sections(run: Run, cluster: Path | None, steps: Iterable[int], budget: int, number: int) -> Sections:
    """The timeline of a run as a canvas, and its balance, or how to record one. `number` makes element ids unique."""
    timeline = spans.read(run.path / "timeline")
    if timeline is None:
        return {"timeline": ("Timeline", [page.paragraph(HOW_TO_RECORD, "note")])}
    packed, world = _packed(run, timeline, cluster, steps, budget)
    measured = pipeline_balance.measure(timeline, run.recipe(), world, run_cluster.of_run(run, cluster))
    reported = [
        f"{len(timeline.steps)} steps on {len(timeline.ranks)} ranks, in ms of rank 0's clock. Each rank has three "
        "lanes: compute; communication; data and optimizer. The pale lane below them is the predicted compute. "
        "Micro-batches differ in shade. The wheel zooms, dragging moves, shift and the wheel scroll through the ranks, "
        "a double click shows all; + - and arrows do the same."
    ]
    if timeline.dropped:
        reported.append(f"{timeline.dropped} lines of the timeline could not be read and are skipped.")
    if len(timeline.ranks) < world:
        reported.append(f"{world - len(timeline.ranks)} of {world} ranks have no timeline.")
    canvas = [
        page.paragraph(" ".join(reported), "note"),
        f'<div id="lanes-{number}"></div>',
        f'<script type="application/json" id="spans-{number}">{page.as_script(packed)}</script>',
        f"<script>window.timelines=window.timelines||[];window.timelines.push(steelyardTimeline(document.getElementById"
        f'("lanes-{number}"),JSON.parse(document.getElementById("spans-{number}").textContent)));</script>',
    ]
    return {
        "timeline": ("Timeline", canvas),
        "balance": ("Bubble and balance", [_table(measured), *_note(measured), *_bars(measured)]),
    }


def timeline_data(run: Run, cluster: Path | None, steps: Iterable[int], budget: int) -> dict[str, Any]:
    """The timeline of a run for `timeline.js`, with hosts and the prediction, or a note on how to record one."""
    timeline = spans.read(run.path / "timeline")
    return {"note": HOW_TO_RECORD} if timeline is None else _packed(run, timeline, cluster, steps, budget)[0]


def _packed(
    run: Run, timeline: Spans, cluster: Path | None, steps: Iterable[int], budget: int
) -> tuple[dict[str, Any], int]:
    """The packed timeline, and the number of ranks."""
    recipe, world = run.recipe(), max(int(run.manifest().get("world_size", 1) or 1), len(timeline.ranks))
    packed = pack(timeline, pipeline_balance.pipeline_ranks(recipe, world), steps, budget)
    hosts = {path.stem: read_object(path) for path in listed(run.path / "hosts", ".json")}
    of_rank = {
        rank: (name, str(host.get("device") or "").removeprefix("NVIDIA "))
        for name, host in hosts.items()
        for rank in (host["ranks"] if isinstance(host.get("ranks"), list) else ())
        if isinstance(rank, int)
    }
    events, why_none = pipeline_balance.predicted_events(recipe, world, run_cluster.of_run(run, cluster))
    drawn = [
        [rank, kind, KINDS.get(kind, UNKNOWN)[1], stage, micro, round(1e3 * start, 6), round(1e3 * (end - start), 6)]
        for rank, kind, stage, micro, start, end in events
    ]
    return packed | {
        "hosts": [of_rank.get(rank.rank, ("", ""))[0] for rank in timeline.ranks],
        "devices": [of_rank.get(rank.rank, ("", ""))[1] for rank in timeline.ranks],
        "predicted": {"spans": drawn, "why_none": why_none or ""},
    }, world


def _table(measured: Balance) -> str:
    def share(value: float | None) -> str:
        return "" if value is None else f"{100 * value:.1f}%"

    def seconds(value: float | None) -> str:
        return "" if value is None else f"{1e3 * value:.2f} ms"

    rows = [
        ["Step time", seconds(measured.step_seconds), seconds(measured.predicted_seconds)],
        ["Bubble: share of the passes' time without compute", share(measured.bubble), share(measured.predicted_bubble)],
        ["Bubble of the schedule with these stage times and instant sends", share(measured.bubble_stages), ""],
        ["Bubble of the schedule with equal stages", share(measured.bubble_even), ""],
        [
            "Imbalance: the slowest stage relative to the mean",
            share(measured.imbalance),
            share(measured.predicted_imbalance),
        ],
    ]
    return page.table([row for row in rows if any(row[1:])], head=["", "measured", "predicted"], numbers=True)


def _note(measured: Balance) -> list[str]:
    if measured.why_no_prediction is None:
        return []
    return [page.paragraph(f"No prediction: {measured.why_no_prediction}.", "note")]


def _bars(measured: Balance) -> list[str]:
    """Per stage: passes of a micro-batch, measured and predicted. Per pipeline rank: the time of a step by kind."""
    drawn = []
    if measured.stages:
        passes = []
        for name in ("forward", "backward"):
            actual = [getattr(one, name) for one in measured.stages]
            expected = [getattr(one, f"predicted_{name}") for one in measured.stages]
            passes.append(Bar(name, _ms(actual), KINDS[name][1], stack="measured"))
            if any(value is not None for value in expected):
                passes.append(Bar(f"{name}, predicted", _ms(expected), KINDS[name][1], stack="predicted", faded=True))
        at = [f"stage {one.stage}" for one in measured.stages]
        drawn.append(charts.titled("Passes of each stage", charts.bars(at, passes, "ms for a micro-batch")))
    parts = [
        Bar(name, _ms([parts[name] for parts in measured.parts.values()]), KINDS.get(name, UNKNOWN)[1])
        for name in next(iter(measured.parts.values()), {})
    ]
    at = [f"pipeline rank {place}" for place in measured.parts]
    drawn.append(charts.titled("Step time by kind", charts.bars(at, parts, "ms of a step")))
    return [charts.side_by_side(drawn)]


def _ms(values: list[Any]) -> list[float | None]:
    return [None if value is None else 1e3 * value for value in values]
