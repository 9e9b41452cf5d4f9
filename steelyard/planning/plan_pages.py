"""The HTML pages of `steelyard plan`: the timeline of a pipeline (`--explain`) and the Pareto frontier (`--pareto`).

Each is one file that needs no network.
"""

from __future__ import annotations

import html
from collections.abc import Sequence

from steelyard.planning import pipeline_sim
from steelyard.planning.plan_report import PlanRequest, figures, shown
from steelyard.planning.results import Plan

COLOURS = {"forward": "#4c78a8", "backward": "#f58518", "weights": "#54a24b"}
MOST = 4000  # Passes drawn in a pipeline timeline; a longer step is cut off.


def pipeline(request: PlanRequest, plan: Plan) -> str:
    """An HTML page with the timeline of a step: the passes of each pipeline rank as SVG bars."""
    from steelyard.core.pages import page

    layout = plan.layout
    step = request.predictor(layout).step(layout)
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
        f"<h2>Step time {plan.seconds:.4f} s (80% range: {plan.range} s)</h2>",
        page.pairs({name: f"{seconds:.4f} s" for name, seconds in vars(plan.parts).items()}),
    ]
    return page.page(request.recipe.name, body)


def frontier(request: PlanRequest, plans: Sequence[Plan]) -> str:
    """An HTML page with days against dollars for the plans of the Pareto frontier."""
    from steelyard.core.pages import charts, page

    amounts = [figures(request, plan) for plan in plans]
    days, dollars = ([each[name] or 0.0 for each in amounts] for name in ("days", "dollars"))
    texts = []
    for plan, day, price in zip(plans, days, dollars, strict=True):
        ranges = (plan.range.scaled(value / plan.seconds) for value in (day, price))
        lines = [shown(plan.layout), " ".join(plan.layout.settings()["placement"])]
        texts.append("\n".join([*lines, "80% range: {} days, {} dollars".format(*ranges)]))
    line = charts.Line("Pareto frontier", days, dollars, marks="too", texts=texts)
    chart = charts.lines([line], "days", "dollars", points=True, height=520)
    return page.page(f"{request.recipe.name}: {request.tokens:,} tokens", [chart], charts.SCRIPTS)
