"""Charts of a page: numbers as JSON in their place, drawn by the scripts of this room as soon as a browser gets there.

A chart needs no library and no id: its place, its numbers and the word to draw it stand behind each other. So the first
ones are there before the rest of a large page has been read. Whoever puts charts on a page hands `SCRIPTS` to its
frame. Names reach the page as text: nothing needs to be escaped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from steelyard.core.pages.page import as_script

SCRIPTS = ("canvas.js", "lines.js", "bars.js")  # and coordinates.js, where there are such
DIGITS = 7  # of a number on the page, which is what a float has
Numbers = Sequence[float | None]


@dataclass
class Line:
    """Values over x, ascending; one that is None or not finite is a gap.

    Lines of several runs have one colour for each run and one dash for each label. `colour` is a place in the page's
    own series, or one of CSS.
    """

    label: str
    x: Sequence[float]
    y: Numbers
    colour: int | str = 0
    run: str = ""
    dash: Literal["", "dash", "dot"] = ""
    marks: Literal["", "too", "only"] = ""  # points beside the line, or without one
    texts: Sequence[str] | None = None  # more to tell of each point


@dataclass
class Bar:
    """Values at each place of a chart; bars of one stack stand on each other."""

    label: str
    values: Numbers
    colour: int | str
    stack: str = ""
    faded: bool = False


@dataclass
class ChartAxis:
    """An axis of parallel coordinates: `marks` and `texts` where the numbers would not say what they stand for."""

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
    """Curves, or with `points` a cloud. Charts of a group are zoomed together and hide the same runs."""
    reported = [
        {
            "run": line.run, "label": line.label, "colour": line.colour, "dash": line.dash, "marks": line.marks,
            "x": [_short(value) for value in line.x], "y": [_short(value) for value in line.y],
        } | ({"texts": list(line.texts)} if line.texts is not None else {})
        for line in shown
    ]  # fmt: skip
    return _chart(
        {"kind": "lines", "x": x, "y": y, "group": group, "points": points, "log": log, "lines": reported}, height
    )


def bars(at: Sequence[str], shown: Sequence[Bar], y: str, height: int = 300) -> str:
    """Stacked bars, stacks beside each other at each place."""
    reported = [vars(bar) | {"values": [_short(value) for value in bar.values]} for bar in shown]
    return _chart({"kind": "bars", "at": list(at), "y": y, "bars": reported}, height)


def coordinates(axes: Sequence[ChartAxis], names: Sequence[str], *, less: bool, height: int = 340) -> str:
    """Parallel coordinates, coloured by the last axis; with `less` the lowest there are the strongest."""
    reported = [{key: value for key, value in vars(axis).items() if value is not None} for axis in axes]
    return _chart({"kind": "coordinates", "axes": reported, "names": list(names), "less": less}, height)


def titled(title: str, chart: str) -> str:
    """A chart below its title; the title must be escaped already."""
    return f"<div><h3>{title}</h3>{chart}</div>"


def side_by_side(drawn: Sequence[str]) -> str:
    """Charts in as many columns as a window has room for."""
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
