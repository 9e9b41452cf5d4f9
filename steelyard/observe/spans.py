"""The timelines of all ranks, `timeline/rank-*.jsonl`, as arrays.

A thousand steps of 64 ranks are millions of spans. They are read rank by rank into arrays. The time of each rank per
step and kind of span is summed while reading, because most readers need only that.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from steelyard.core.safe_parse import loads

Array = npt.NDArray[Any]

COMPUTE, COMMUNICATION, OTHER = 0, 1, 2  # lanes; OTHER is data and the optimizer
# Lane and colour of each kind of span.
KINDS = {
    "forward": (COMPUTE, "#3b78c3"),
    "backward": (COMPUTE, "#e8833a"),
    "weights": (COMPUTE, "#d9b13b"),
    "send": (COMMUNICATION, "#7a5cc0"),
    "receive": (COMMUNICATION, "#b9a3e3"),
    "wait": (COMMUNICATION, "#c9ced6"),
    "gradients": (COMMUNICATION, "#c2417c"),
    "reduce": (COMMUNICATION, "#c2417c"),
    "optimizer": (OTHER, "#2f9e6e"),
    "update": (OTHER, "#2f9e6e"),
    "data": (OTHER, "#8d6e4f"),
}
UNKNOWN = (OTHER, "#77808c")
MOST_NUMBER = 1 << 62  # Nanoseconds since 1970 have 61 bits.
MOST_NAMES = 64  # A file with more kinds of spans is not a timeline.


@dataclass
class RankSpans:
    """The spans of one rank, ordered by start."""

    rank: int
    step: Array
    name: Array
    stage: Array
    micro_batch: Array
    start: Array
    end: Array


@dataclass
class Spans:
    """The spans of all ranks and, for each step, its time range and the time of each rank by kind (nanoseconds)."""

    names: list[str]
    ranks: list[RankSpans]
    steps: Array
    begin: Array
    end: Array
    sums: Array
    """Nanoseconds by step, rank and name."""
    dropped: int
    """Lines that could not be read."""

    @property
    def length(self) -> Array:
        """Nanoseconds of each step, from the first span of any rank to the last span of any rank."""
        return self.end - self.begin

    def lane(self, lane: int) -> list[int]:
        """Indices of the names that belong to a lane."""
        return [number for number, name in enumerate(self.names) if KINDS.get(name, UNKNOWN)[0] == lane]


def read(folder: Path) -> Spans | None:
    """The timeline of a run; None if there is none."""
    names = list(KINDS)
    ranks, dropped = [], 0
    for path in sorted(folder.glob("rank-*.jsonl")):
        spans, bad = _read_rank(path, names)
        dropped += bad
        if spans is not None:
            ranks.append(spans)
    return _together(names, ranks, dropped) if ranks else None


def _read_rank(path: Path, names: list[str]) -> tuple[RankSpans | None, int]:
    number = path.stem.removeprefix("rank-")
    entries, dropped = _entries(path)
    rows = []
    known = {name: place for place, name in enumerate(names)}
    for entry in entries:
        try:
            name = str(entry["name"])
            place = known.get(name)
            if place is None:
                if len(names) >= MOST_NAMES:
                    raise ValueError(name)
                place = known[name] = len(names)
                names.append(name)
            row = (int(entry["step"]), place, int(entry["stage"]), int(entry["micro_batch"]),
                   int(entry["start_ns"]), int(entry["end_ns"]))  # fmt: skip
            if max(map(abs, row)) >= MOST_NUMBER:
                raise ValueError(name)
            rows.append(row)
        except (KeyError, TypeError, ValueError, OverflowError):
            dropped += 1
    if not rows or not number.isdigit():
        return None, dropped
    table = np.array(rows, dtype=np.int64)
    table = table[np.argsort(table[:, 4], kind="stable")]
    return RankSpans(int(number), *(np.ascontiguousarray(table[:, column]) for column in range(6))), dropped


def _entries(path: Path) -> tuple[list[Any], int]:
    """The JSON objects of a file. Parsing all lines in one call is several times faster than one call per line."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    try:
        return loads(f"[{','.join(lines)}]"), 0
    except (ValueError, RecursionError):
        entries = []
        for line in lines:
            try:
                entries.append(loads(line))
            except (ValueError, RecursionError):
                continue
        return entries, len(lines) - len(entries)


def _together(names: list[str], ranks: list[RankSpans], dropped: int) -> Spans:
    steps = np.unique(np.concatenate([rank.step for rank in ranks]))
    count = len(steps)
    begin, end = np.full(count, np.iinfo(np.int64).max), np.full(count, np.iinfo(np.int64).min)
    sums = np.zeros((count, len(ranks), len(names)), dtype=np.int64)
    for number, rank in enumerate(ranks):
        place = np.searchsorted(steps, rank.step)
        np.minimum.at(begin, place, rank.start)
        np.maximum.at(end, place, rank.end)
        np.add.at(sums[:, number], (place, rank.name), rank.end - rank.start)
    used = [number for number in range(len(names)) if sums[:, :, number].any()]
    renumbered = np.zeros(len(names), dtype=np.int64)
    renumbered[used] = np.arange(len(used))
    for rank in ranks:
        keep = np.isin(rank.name, used)
        for field in ("step", "name", "stage", "micro_batch", "start", "end"):
            setattr(rank, field, getattr(rank, field)[keep])
        rank.name = renumbered[rank.name]
    return Spans([names[number] for number in used], ranks, steps, begin, end, sums[:, :, used], dropped)
