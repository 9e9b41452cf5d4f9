"""The curves of a run, live or finished: the data of the charts on the live page and in reports (`pages/curves.js`).

    {"axes": {"step": [...], "tokens": [...], "time": [...]},   # the same moments on each x-axis; time in seconds
     "charts": [{"title": "Loss", "unit": "nats per token", "log": false, "limits": null, "fixed": false,
                 "lines": [{"label": "training", "over": "step", "marks": "", "x": [...], "y": [... or null]}]}],
     "note": ""}

Metrics are recorded by step, samples of devices by time. The page converts x-values with `axes`, so that all charts
share one x-axis and one zoom. Files are followed by offset: a refresh reads only what was added.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from steelyard.core.run import MANIFEST, METRICS
from steelyard.core.safe_parse import json_objects, read_object
from steelyard.observe.host_logs import is_number
from steelyard.observe.run_files import listed
from steelyard.observe.run_state import LOGS, seconds_of
from steelyard.observe.tail import Tail

MOST_POINTS = 4000  # per curve; a longer one keeps the lowest and the highest point of each interval
MOST_HOSTS = 16
MOST_METRICS, MOST_SAMPLES = 256 << 20, 16 << 20  # bytes of one file that are read; of a longer one its end
WIDE = 50  # ratio of highest to lowest value from which on the scale is logarithmic at first
SPIKED = ("Loss", "Gradient norm")  # curves whose low values matter
DIGITS = 7  # significant digits, as many as a float32 has
NATS = "nats per token"
PERCENT = (0.0, 100.0)
# Title, unit, and the keys of a record with their labels and factors.
CURVES: list[tuple[str, str, list[tuple[str, str, float]]]] = [
    ("Loss", NATS, [("loss", "training", 1), ("valid_loss", "validation", 1)]),
    (
        "Preferences",
        "over the reference model",
        [("reward_margin", "margin of rewards", 1), ("reward_accuracy", "share of correctly ordered pairs", 1)],
    ),
    ("Throughput", "tokens per second", [("tokens_per_second", "tokens/s", 1)]),
    ("MFU", "% of the device's peak", [("mfu", "MFU", 100)]),
    ("Gradient norm", "", [("grad_norm", "gradient norm", 1)]),
    ("Learning rate", "", [("learning_rate", "learning rate", 1)]),
    ("Memory", "GiB, peak of the fullest rank", [("peak_memory", "peak memory", 2**-30)]),
    ("Step time", "s", [("seconds", "mean since the last record", 1)]),
    ("Compute per rank", "TFLOP/s", [("tflops", "TFLOP/s", 1)]),
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
# Title, unit, key of a device's sample, and divisor.
DEVICES = (
    ("Utilisation", "%, mean of the host's devices", "utilisation", 1.0),
    ("Memory in use", "GiB, mean of the host's devices", "memory_used", float(1 << 30)),
    ("Temperature", "°C, mean of the host's devices", "temperature", 1.0),
    ("Power", "W, mean of the host's devices", "power", 1.0),
)
LIMITS = {"MFU": PERCENT, "Utilisation": PERCENT}  # A share of what a device can do is never above 100%.
FIXED = ("Utilisation",)  # always shown from limit to limit
Floats = npt.NDArray[np.float64]


class Column:
    """Pairs of x and y, appended as they arrive. NaN is a gap."""

    def __init__(self) -> None:
        self.x, self.y = array("d"), array("d")

    def add(self, x: float, y: Any, factor: float) -> None:
        """Append a value of an untrusted file."""
        self.x.append(x)
        self.y.append(y * factor if is_number(y) else math.nan)

    def line(self, label: str, over: str, most: int, shift: float = 0.0) -> dict[str, Any]:
        """The line in a chart."""
        x, y = thinned(np.array(self.x) - shift, np.array(self.y), most)
        return {"label": label, "over": over, "marks": "", "x": _short(x), "y": _short(y)}


class RunCurves:
    """The curves of one run folder."""

    def __init__(self, path: Path, most: int = MOST_POINTS) -> None:
        self.path, self.most = path, most
        self._metrics = Tail(path / METRICS, MOST_METRICS, MOST_METRICS)
        self._columns: dict[str, Column] = {}
        self._moments: list[tuple[float, float, float]] = []
        self._hosts: dict[str, tuple[Tail, dict[str, Column]]] = {}
        self._left_out = 0

    def refresh(self) -> RunCurves:
        """Read what was added."""
        lines, is_new = self._metrics.lines()
        if is_new:
            self._columns.clear()
            self._moments.clear()
        for record in json_objects(lines):
            if type(record.get("step")) is int:
                self._add(record)
        paths = listed(self.path / LOGS, ".gpu")
        self._left_out = max(0, len(paths) - MOST_HOSTS)
        for path in paths[:MOST_HOSTS]:
            tail, columns = self._hosts.setdefault(path.stem, (Tail(path, MOST_SAMPLES, MOST_SAMPLES), {}))
            lines, is_new = tail.lines()
            if is_new:
                columns.clear()
            for sample in json_objects(lines):
                _add_sample(columns, sample)
        return self

    def data(self, predicts_tokens: bool = True) -> dict[str, Any]:
        """The data of the charts. `predicts_tokens`: the loss is in nats per token."""
        begin = self._begin()
        charts = []
        for title, unit, kinds in CURVES:
            known = [(key, label) for key, label, _ in kinds if key in self._columns]
            lines = [self._columns[key].line(label, "step", self.most) for key, label in known]
            for (key, _), line in zip(known, lines, strict=True):
                line["marks"] = "too" if key == "valid_loss" else ""
            charts.append(_chart(title, "" if unit == NATS and not predicts_tokens else unit, lines))
        for title, unit, key, _ in DEVICES:
            hosts = [(host, columns[key]) for host, (_, columns) in sorted(self._hosts.items()) if key in columns]
            charts.append(_chart(title, unit, [each.line(host, "time", self.most, begin) for host, each in hosts]))
        note = f"Devices: the first {MOST_HOSTS} of {MOST_HOSTS + self._left_out} hosts." if self._left_out else ""
        return {"axes": self._axes(begin), "charts": [each for each in charts if each["lines"]], "note": note}

    def seconds(self, moment: float) -> float:
        """A time of day on the axis of time."""
        return moment - self._begin()

    def _add(self, record: dict[str, Any]) -> None:
        step, tokens, moment = record["step"], record.get("tokens"), record.get("time")
        at = float(tokens) if is_number(tokens) else 0.0 if step == 0 else math.nan
        self._moments.append((step, at, float(moment) if is_number(moment) else math.nan))
        for _, _, kinds in CURVES:
            for key, _, factor in kinds:
                if key in record:
                    self._columns.setdefault(key, Column()).add(step, record[key], factor)

    def _begin(self) -> float:
        """When the run began: the earliest time that is known."""
        started = seconds_of(read_object(self.path / MANIFEST).get("started"))
        known = [moment for _, _, moment in self._moments[:1] if not math.isnan(moment)]
        known += [column.x[0] for _, columns in self._hosts.values() for column in columns.values()]
        return min([*known, *([] if started is None else [started])], default=0.0)

    def _axes(self, begin: float) -> dict[str, list[Any]]:
        """Moments of the run as step, tokens and seconds since its begin, ascending."""
        if not self._moments:
            return {"step": [], "tokens": [], "time": []}
        table = np.array(self._moments)
        step, last = np.unique(table[::-1, 0], return_index=True)  # the last record of each step
        tokens, moment = table[len(table) - 1 - last, 1], table[len(table) - 1 - last, 2] - begin
        keep = np.unique(np.linspace(0, len(step) - 1, min(len(step), self.most)).round().astype(int))
        axes = {"step": step[keep]}
        for name, values in (("tokens", tokens), ("time", moment)):
            known = ~np.isnan(values)
            axes[name] = np.interp(step[keep], step[known], values[known]) if known.any() else step[keep][:0]
        return {name: _short(np.maximum.accumulate(values), 12) for name, values in axes.items()}


def thinned(x: Floats, y: Floats, most: int) -> tuple[Floats, Floats]:
    """At most `most` points: the lowest and the highest of each interval, so that no peak is lost.

    An interval is a power of two, so that the points of a growing curve rarely change.
    """
    count = len(x)
    if count <= most:
        return x, y
    interval = 1 << (-(-2 * count // most) - 1).bit_length()
    heights = np.where(np.isnan(y), -math.inf, y)
    heights = np.concatenate([heights, np.full(-count % interval, heights[-1])]).reshape(-1, interval)
    first = np.arange(len(heights)) * interval
    picked = np.unique(np.concatenate([first + heights.argmin(axis=1), first + heights.argmax(axis=1)]))
    picked = picked[picked < count]
    return x[picked], y[picked]


def _add_sample(columns: dict[str, Column], sample: dict[str, Any]) -> None:
    devices = sample.get("devices")
    if not is_number(sample.get("time")) or not isinstance(devices, list):
        return
    for _, _, key, divisor in DEVICES:
        values = [one[key] for one in devices if isinstance(one, dict) and is_number(one.get(key))]
        if values:
            columns.setdefault(key, Column()).add(sample["time"], sum(values) / len(values), 1 / divisor)


def _chart(title: str, unit: str, lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    values = [value for line in lines for value in line["y"] if value is not None]
    is_wide = bool(values) and min(values) > 0 and max(values) > WIDE * min(values)
    return {
        "title": title, "unit": unit, "log": title in SPIKED and is_wide, "limits": LIMITS.get(title),
        "fixed": title in FIXED, "lines": lines,
    }  # fmt: skip


def _short(values: Iterable[float], digits: int = DIGITS) -> list[float | None]:
    """Numbers for JSON, with NaN as None."""
    numbers = (float(value) for value in values)
    return [
        None if not math.isfinite(value) else int(value) if value.is_integer() else float(f"{value:.{digits}g}")
        for value in numbers
    ]
