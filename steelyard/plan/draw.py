"""A plan's pipeline and the frontier of time and price, each as one HTML file that opens without a network."""

from __future__ import annotations

import html
from collections.abc import Sequence

from steelyard.core.recipe import Recipe
from steelyard.plan import pipeline as pipelines
from steelyard.plan.cluster import Cluster
from steelyard.plan.found import Plan
from steelyard.plan.predict import Predictor
from steelyard.plan.profile import Profile
from steelyard.plan.report import DAY, shown
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
            f'height="20" fill="{COLOURS[kind]}" stroke="#fff" stroke-width=".4"><title>{title}</title></rect>'
        )
    names = [
        f'<text x="94" y="{34 + 24 * rank}" text-anchor="end">rank {rank}</text>' for rank in range(layout.pipeline)
    ]
    legend = " ".join(f'<span style="color:{colour}">&#9632; {kind}</span>' for kind, colour in COLOURS.items())
    parts = "".join(f"<tr><td>{name}</td><td>{seconds:.4f} s</td></tr>" for name, seconds in vars(plan.parts).items())
    return (
        f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>{html.escape(recipe.name)}</title><style>"
        "body{font:15px system-ui,sans-serif;margin:2rem} text{font-size:11px} td{padding-right:2rem}</style></head>"
        f"<body><h1>{html.escape(recipe.name)}</h1><p>{html.escape(shown(layout))}; nodes in rank order: "
        f"{html.escape(' '.join(layout.settings()['placement']))}; layers per stage "
        f"{layout.settings()['partition']}</p>"
        f"<p>{legend}; {1e3 * end:.1f} ms from left to right</p>"
        f"<svg viewBox='0 0 1110 {40 + 24 * layout.pipeline}' width='100%'>{''.join(names)}{''.join(bars)}</svg>"
        f"<h2>A step of {plan.seconds:.4f} s</h2><table>{parts}</table></body></html>\n"
    )


def frontier(recipe: Recipe, plans: list[Plan], tokens: int) -> str:
    """Days against dollars for plans that no other beats in both."""
    from plotly import graph_objects

    steps = tokens / (recipe.train.global_batch * recipe.data.sequence_length)
    days = [plan.seconds * steps / DAY for plan in plans]
    dollars = [day * 24 * (plan.price_hour or 0.0) for day, plan in zip(days, plans, strict=True)]
    labels = [f"{shown(plan.layout)}<br>{' '.join(plan.layout.settings()['placement'])}" for plan in plans]
    figure = graph_objects.Figure(graph_objects.Scatter(x=days, y=dollars, text=labels, mode="lines+markers"))
    figure.update_layout(
        title=f"{recipe.name}: {tokens:,} tokens", xaxis_title="days", yaxis_title="dollars", template="plotly_white"
    )
    return str(figure.to_html(full_html=True, include_plotlyjs=True))
