"""A plan's pipeline and the frontier of time and price, each as one HTML file that opens without a network."""

from __future__ import annotations

import html
from collections.abc import Sequence

from steelyard.core.pages import charts, page
from steelyard.core.recipe import Recipe
from steelyard.plan import pipeline_sim as pipelines
from steelyard.plan.cluster import Cluster
from steelyard.plan.measured_layers import Profile
from steelyard.plan.plan_report import DAY, shown
from steelyard.plan.predict import Predictor
from steelyard.plan.results import Plan
from steelyard.plan.software import STEELYARD, Software

COLOURS = {"forward": "#4c78a8", "backward": "#f58518", "weights": "#54a24b"}
MOST = 4000  # Actions that are drawn; a longer step is cut off there.


def pipeline(
    recipe: Recipe,
    cluster: Cluster,
    plan: Plan,
    software: Software = STEELYARD,
    profiles: Sequence[Profile] = (),
) -> str:
    """What each pipeline rank does in a step, as bars in SVG: forward, backward, and waiting in between."""
    layout = plan.layout
    step = Predictor.of_layout(recipe, cluster, layout, software, profiles).step(layout)
    events = pipelines.events(step.times(layout.partition), *step.plan)
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
        f"<h2>A step of {plan.seconds:.4f} s</h2>",
        page.pairs({name: f"{seconds:.4f} s" for name, seconds in vars(plan.parts).items()}),
    ]
    return page.page(recipe.name, body)


def frontier(recipe: Recipe, plans: list[Plan], tokens: int) -> str:
    """Days against dollars for plans that no other beats in both."""
    steps = tokens / (recipe.train.global_batch * recipe.data.sequence_length)
    days = [plan.seconds * steps / DAY for plan in plans]
    dollars = [day * 24 * (plan.price_hour or 0.0) for day, plan in zip(days, plans, strict=True)]
    texts = [f"{shown(plan.layout)}\n{' '.join(plan.layout.settings()['placement'])}" for plan in plans]
    line = charts.Line("plans that no other beats", days, dollars, marks="too", texts=texts)
    chart = charts.lines([line], "days", "dollars", points=True, height=520)
    return page.page(f"{recipe.name}: {tokens:,} tokens", [chart], charts.SCRIPTS)
