"""Charts of a page: JSON data in the page, drawn by the scripts of this package.

A chart needs no library and no id: its container, its data and the call that draws it are consecutive elements. The
browser therefore draws the first charts before it has parsed the rest of a large page. A page with charts passes
`SCRIPTS` to `page`. Names are set as text, so callers need not escape them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from steelyard.core.pages.page import as_script

SCRIPTS = ("canvas.js", "lines.js", "bars.js")  # and coordinates.js, for parallel coordinates
DIGITS = 7  # significant digits, as many as a float32 has
Numbers = Sequence[float | None]


@dataclass
class Line:
    """Values over ascending x; one that is None or not finite is a gap.

    With several runs, each run has a colour and each label a dash. `colour` is an index into the page's series or a
    CSS colour.
    """

    label: str
    x: Sequence[float]
    y: Numbers
    colour: int | str = 0
    run: str = ""
    dash: Literal["", "dash", "dot"] = ""
    marks: Literal["", "too", "only"] = ""  # points in addition to the line, or instead of it
    texts: Sequence[str] | None = None  # tooltip text of each point


@dataclass
class Bar:
    """One value per category of a chart; bars with the same stack are stacked."""

    label: str
    values: Numbers
    colour: int | str
    stack: str = ""
    faded: bool = False


@dataclass
class ChartAxis:
    """An axis of parallel coordinates: `marks` and `texts` for values that are not numbers to the reader."""

    label: str
    values: Sequence[float]
    marks: list[tuple[float, str]] | None = None
    texts: list[str] | None = field(default=None)


def lines(
    shown: Sequence[Line],
    x: str,
    y: str,
    *,
    group: str = "",
    points: bool = False,
    log: bool = False,
    height: int = 300,
) -> str:
    """A line chart, or with `points` a scatter plot. Charts of a group zoom together and hide the same runs."""
    data = [
        {
            "run": line.run, "label": line.label, "colour": line.colour, "dash": line.dash, "marks": line.marks,
            "x": [_short(value) for value in line.x], "y": [_short(value) for value in line.y],
        } | ({"texts": list(line.texts)} if line.texts is not None else {})
        for line in shown
    ]  # fmt: skip
    return _chart(
        {"kind": "lines", "x": x, "y": y, "group": group, "points": points, "log": log, "lines": data}, height
    )


def curves(runs: Sequence[dict[str, Any]]) -> str:
    """The curves of runs, one chart per quantity (`curves.js`, which the page must name)."""
    return (
        f'<div></div><script type="application/json">{as_script({"kind": "curves", "runs": runs})}</script>'
        "<script>steelyard.here()</script>"
    )


def bars(at: Sequence[str], shown: Sequence[Bar], y: str, height: int = 300) -> str:
    """Stacked bars, with the stacks of a category side by side."""
    data = [vars(bar) | {"values": [_short(value) for value in bar.values]} for bar in shown]
    return _chart({"kind": "bars", "at": list(at), "y": y, "bars": data}, height)


def coordinates(axes: Sequence[ChartAxis], names: Sequence[str], *, less: bool, height: int = 340) -> str:
    """Parallel coordinates, coloured by the last axis; with `less` its lowest values have the strongest colour."""
    data = [{key: value for key, value in vars(axis).items() if value is not None} for axis in axes]
    return _chart({"kind": "coordinates", "axes": data, "names": list(names), "less": less}, height)


def titled(title: str, chart: str) -> str:
    """A chart with a title, which must be escaped already."""
    return f"<div><h3>{title}</h3>{chart}</div>"


def side_by_side(drawn: Sequence[str]) -> str:
    """Charts in as many columns as fit the window."""
    return f'<div class="charts">{"".join(drawn)}</div>'


def _chart(chart: dict[str, Any], height: int) -> str:
    return (
        f'<div class="chart" style="min-height:{height}px"></div>'
        f'<script type="application/json">{as_script(chart | {"height": height})}</script>'
        "<script>steelyard.here()</script>"
    )


def _short(value: float | None) -> float | None:
    if value is None or not math.isfinite(value):
        return None
    return value if isinstance(value, int) else float(f"{value:.{DIGITS}g}")
