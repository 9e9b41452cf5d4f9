"""Curves of one run or several over their steps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar

from steelyard.core.pages import charts
from steelyard.core.pages.charts import Line

MOST_POINTS = 4000  # Of a curve; a longer one keeps the lowest and the highest of each stretch.
WIDE = 50  # How many times the lowest value of such a curve the highest is where the scale begins as one of powers.
SPIKED = ("Loss", "Gradient norm")  # Curves whose low values are what matters.
DASHES: tuple[Literal["", "dash", "dot"], ...] = ("", "dot", "dash")
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


def draw(runs: Mapping[str, Records], predicts_tokens: bool = True) -> str:
    """All curves that any of the runs, given by name, has values for; the loss may be another than of tokens."""
    drawn = []
    for title, unit, kinds in CURVES:
        lines = [line for number, run in enumerate(runs) for line in _lines(runs, run, number, kinds)]
        if lines:
            shown = "" if unit == NATS and not predicts_tokens else unit
            chart = charts.lines(lines, "step", shown, group="steps", log=title in SPIKED and _is_wide(lines))
            drawn.append(charts.titled(title, chart))
    return charts.side_by_side(drawn) if drawn else "<p>Nothing was recorded yet.</p>"


def _lines(
    runs: Mapping[str, Records], run: str, number: int, kinds: Sequence[tuple[str, str, float]]
) -> Iterator[Line]:
    """A run's lines of one chart: coloured by kind where it is alone, else by run."""
    several = len(runs) > 1
    for place, (key, label, factor) in enumerate(kinds):
        steps, values = points(runs[run], key, factor)
        if steps:
            yield Line(
                label, steps, values, colour=number if several else place, run=run if several else "",
                dash=DASHES[place % len(DASHES)] if several else "", marks="too" if key == "valid_loss" else "",
            )  # fmt: skip


def _is_wide(lines: Sequence[Line]) -> bool:
    """Whether values are spread so widely that the low ones could not be told apart on a plain scale."""
    values = [value for line in lines for value in line.y if value is not None]
    return bool(values) and min(values) > 0 and max(values) > WIDE * min(values)


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
