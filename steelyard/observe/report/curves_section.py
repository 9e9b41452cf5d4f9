"""Curves of one or several runs by step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar

from steelyard.core.pages import charts
from steelyard.core.pages.charts import Line

MOST_POINTS = 4000  # per curve; a longer one keeps the lowest and the highest point of each interval
WIDE = 50  # ratio of highest to lowest value from which on the scale is logarithmic at first
SPIKED = ("Loss", "Gradient norm")  # curves whose low values matter
DASHES: tuple[Literal["", "dash", "dot"], ...] = ("", "dot", "dash")
NATS = "nats per token"
# Title, unit, and the keys of a record with their labels and factors.
CURVES: list[tuple[str, str, list[tuple[str, str, float]]]] = [
    ("Loss", NATS, [("loss", "training", 1), ("valid_loss", "validation", 1)]),
    (
        "Preferences",
        "over the reference model",
        [("reward_margin", "margin of rewards", 1), ("reward_accuracy", "share of correctly ordered pairs", 1)],
    ),
    ("Throughput", "tokens per second", [("tokens_per_second", "tokens/s", 1)]),
    ("Learning rate", "", [("learning_rate", "learning rate", 1)]),
    ("Gradient norm", "", [("grad_norm", "gradient norm", 1)]),
    ("Step time", "s", [("seconds", "mean since the last record", 1)]),
    ("MFU", "% of the device's peak", [("mfu", "MFU", 100)]),
    ("Compute per rank", "TFLOP/s", [("tflops", "TFLOP/s", 1)]),
    ("Memory", "GiB, peak of the fullest rank", [("peak_memory", "peak memory", 2**-30)]),
    (
        "Expert load",
        "load of the busiest expert, in even loads",
        [("expert_load", "worst layer", 1), ("expert_load_mean", "mean of the layers", 1)],
    ),
    ("Router", "nats", [("router_entropy", "entropy", 1), ("router_loss", "losses", 1)]),
    ("Dropped tokens", "% of the experts' tokens", [("experts_dropped", "dropped", 100)]),
    (
        "Masks",
        "shares of all groups",
        [
            ("mask_max_probability", "mean probability of the likeliest mask", 1),
            ("mask_changed", "changed since the last record", 1),
            ("mask_from_prior", "different from the prior", 1),
        ],
    ),
]
Records = Sequence[dict[str, Any]]
X = TypeVar("X")


def draw(runs: Mapping[str, Records], predicts_tokens: bool = True) -> str:
    """All curves that any of the runs, by name, has values for. `predicts_tokens`: the loss is in nats per token."""
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
    """The lines of a run in one chart, coloured by kind for a single run, else by run."""
    several = len(runs) > 1
    for place, (key, label, factor) in enumerate(kinds):
        steps, values = points(runs[run], key, factor)
        if steps:
            yield Line(
                label, steps, values, colour=number if several else place, run=run if several else "",
                dash=DASHES[place % len(DASHES)] if several else "", marks="too" if key == "valid_loss" else "",
            )  # fmt: skip


def _is_wide(lines: Sequence[Line]) -> bool:
    """Whether the range is so wide that low values could not be distinguished on a linear scale."""
    values = [value for line in lines for value in line.y if value is not None]
    return bool(values) and min(values) > 0 and max(values) > WIDE * min(values)


def points(records: Records, key: str, factor: float = 1) -> tuple[list[int], list[float | None]]:
    """Steps and values of a key, thinned. A value that is not finite is a gap."""
    curve = [
        (record["step"], record[key] * factor if is_number(record[key]) else None)
        for record in records
        if key in record
    ]
    curve = thinned(curve, MOST_POINTS)
    return [step for step, _ in curve], [value for _, value in curve]


def thinned(curve: list[tuple[X, float | None]], most: int) -> list[tuple[X, float | None]]:
    """At most `most` points: the lowest and the highest of each interval, so that no peak is lost."""
    if len(curve) <= most:
        return curve
    interval = -(-len(curve) // (most // 2))
    kept: list[tuple[X, float | None]] = []
    for first in range(0, len(curve), interval):
        part = curve[first : first + interval]
        low, high = (pick(range(len(part)), key=lambda place: _height(part[place])) for pick in (min, max))
        kept += [part[place] for place in sorted({low, high})]
    return kept


def is_number(value: Any) -> bool:
    """Whether a value of a file can be drawn."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < math.inf


def _height(point: tuple[Any, float | None]) -> float:
    return -math.inf if point[1] is None else point[1]
