"""Curves of one run or several over their steps, drawn by plotly."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from steelyard.core.errors import UserError
from steelyard.observe.report import page

MOST_POINTS = 4000  # Of a curve; a longer one keeps the lowest and the highest of each stretch.
SMALL = 1e-2  # Numbers below are written with a power of ten.
COLOURS = ("#2563a8", "#d9742b", "#2f9e6e", "#b83280", "#7a5cc0", "#8d6e4f", "#0f8a9d", "#c93b3b")
DASHES = ("solid", "dot", "dash")
NATS = "nats per token"
# Title, what the values are, and the keys of a record with their names and factors.
CURVES: list[tuple[str, str, list[tuple[str, str, float]]]] = [
    ("Loss", NATS, [("loss", "training", 1), ("valid_loss", "validation", 1)]),
    (
        "Preferences",
        "over the reference model",
        [("reward_margin", "margin of rewards", 1), ("reward_accuracy", "share of pairs in order", 1)],
    ),
    ("Throughput", "tokens per second", [("tokens_per_second", "tokens/s", 1)]),
    ("Learning rate", "", [("learning_rate", "learning rate", 1)]),
    ("Gradient norm", "", [("grad_norm", "gradient norm", 1)]),
    ("Seconds of a step", "s", [("seconds", "mean since the last record", 1)]),
    ("MFU", "% of the device's peak", [("mfu", "MFU", 100)]),
    ("Arithmetic of each rank", "TFLOP/s", [("tflops", "TFLOP/s", 1)]),
    ("Memory", "GiB, the fullest rank's peak", [("peak_memory", "peak memory", 2**-30)]),
    (
        "Masks",
        "shares of all groups",
        [
            ("mask_max_probability", "how decided", 1),
            ("mask_changed", "changed since the last record", 1),
            ("mask_from_prior", "not the prior's", 1),
        ],
    ),
]
Records = Sequence[dict[str, Any]]
X = TypeVar("X")


class Charts:
    """Figures of a page, which are drawn at its end.

    The plotting library is megabytes that a browser takes a second or two to read: what needs none of it, like the
    timeline, should be there before. Each figure is drawn on its own, so that the page can be used meanwhile.
    """

    def __init__(self) -> None:
        try:
            from plotly import graph_objects
        except ImportError:
            raise UserError("plotly is not installed", mend="pip install plotly") from None
        self.objects: Any = graph_objects
        self._figures: list[str] = []

    def draw(self, figure: Any, height: int = 300, **layout: Any) -> str:
        """The place of a figure in a page."""
        figure.update_layout(
            height=height, margin={"l": 60, "r": 20, "t": 48, "b": 45}, template="plotly_white",
            legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "traceorder": "normal"}, **layout,
        )  # fmt: skip
        self._figures.append(figure.to_json())
        return f'<div id="figure-{len(self._figures) - 1}" class="plotly-graph-div" style="height:{height}px"></div>'

    def program(self) -> str:
        """What draws all of them; it stands at the end of the page."""
        if not self._figures:
            return ""
        from plotly.offline import get_plotlyjs

        figures = ",".join(self._figures).replace("<", "\\u003c")  # Nothing in it can end the script.
        data = f'<script type="application/json" id="figures">[{figures}]</script>'
        return f"{data}\n<script>{get_plotlyjs()}</script>\n<script>{page.program('figures.js')}</script>"


def draw(charts: Charts, runs: Mapping[str, Records], predicts_tokens: bool = True) -> str:
    """All curves that any of the runs, given by name, has values for; the loss may be another than of tokens."""
    drawn = []
    for title, unit, lines in CURVES:
        is_other = unit == NATS and not predicts_tokens
        figure = charts.objects.Figure()
        for number, (run, records) in enumerate(runs.items()):
            for place, (key, label, factor) in enumerate(lines):
                steps, values = points(records, key, factor)
                if steps:
                    several = len(runs) > 1
                    figure.add_scatter(
                        x=steps, y=values, name=html.escape(f"{run}, {label}" if several else label),
                        mode="lines" if len(steps) > 1 and key != "valid_loss" else "lines+markers",
                        line={"color": COLOURS[(number if several else place) % len(COLOURS)],
                              "dash": DASHES[place % len(DASHES)] if several else "solid"},
                    )  # fmt: skip
        if figure.data:
            unit = "" if is_other else unit
            shown = charts.draw(figure, xaxis_title="step", yaxis={"title": {"text": unit}, **_axis(figure)})
            drawn.append(f"<div><h3>{title}</h3>{shown}</div>")
    return f'<div class="charts">{"".join(drawn)}</div>' if drawn else "<p>Nothing was recorded yet.</p>"


def _axis(figure: Any) -> dict[str, Any]:
    """What plotly would do badly: a flat curve between -1 and 1, so that 0.0001 looked like nothing; 100µ for 1e-4."""
    values = {value for line in figure.data for value in line.y if value is not None}
    is_flat = len(values) == 1 and values != {0.0}
    is_small = max(map(abs, values), default=1.0) < SMALL
    return ({"range": sorted([0.0, 2.0 * next(iter(values))])} if is_flat else {}) | (
        {"exponentformat": "e"} if is_small else {}
    )


def points(records: Records, key: str, factor: float = 1) -> tuple[list[int], list[float | None]]:
    """Steps and values of a key, thinned. A value that is no number is a gap."""
    found = [
        (record["step"], record[key] * factor if is_number(record[key]) else None)
        for record in records
        if key in record
    ]
    found = thinned(found, MOST_POINTS)
    return [step for step, _ in found], [value for _, value in found]


def thinned(found: list[tuple[X, float | None]], most: int) -> list[tuple[X, float | None]]:
    """At most so many points: of each stretch the lowest and the highest, so that no peak is lost."""
    if len(found) <= most:
        return found
    stretch = -(-len(found) // (most // 2))
    kept: list[tuple[X, float | None]] = []
    for first in range(0, len(found), stretch):
        part = found[first : first + stretch]
        low, high = (pick(range(len(part)), key=lambda place: _height(part[place])) for pick in (min, max))
        kept += [part[place] for place in sorted({low, high})]
    return kept


def is_number(value: Any) -> bool:
    """Whether a value of a file can be drawn."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < math.inf


def _height(point: tuple[Any, float | None]) -> float:
    return -math.inf if point[1] is None else point[1]
