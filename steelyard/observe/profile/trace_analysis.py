"""Analysis of a rank's events: top kernels, idle time, overlap of communication, host stalls and memory.

On a GPU, busy means that a kernel or a copy runs. On a CPU it means that a torch operator runs; `kernels` are then
operators with their self time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from steelyard.observe.profile.events import (
    COMMUNICATION,
    WAITING,
    Events,
    Stretch,
    both,
    clipped,
    gaps,
    length,
    own_time,
    union,
)
from steelyard.observe.spans import Array

MOST_KERNELS, MOST_WAITS, MOST_GAPS, MOST_ALLOCATORS = 25, 8, 5, 12
OUTSIDE = "between the parts"


@dataclass(frozen=True)
class Named:
    """A kernel, call or operator: number of occurrences, and total seconds (or bytes)."""

    name: str
    count: int
    amount: float
    memory: float | None = None
    """Memory throughput in percent of the peak, if measured."""
    computing: float | None = None
    """Compute throughput in percent of the peak, if measured."""


@dataclass(frozen=True)
class RankProfile:
    """The analysis of one rank. Times are in seconds, over all profiled steps."""

    rank: int
    tool: str
    device: str
    steps: int
    seconds: float
    busy: float
    communication: float
    overlapped: float
    """Communication that overlaps with compute."""
    copies: float
    kernels: list[Named]
    waits: list[Named]
    waiting: float
    idle_by_part: dict[str, float]
    longest_gaps: list[tuple[str, float, str]]
    """The part of the step, seconds, and the host call or operator that took most of the gap."""
    asker: str | None = None
    """The operator, if any, and the part of the step in which the host waited most."""
    peak_bytes: int | None = None
    peak_part: str | None = None
    allocators: list[Named] | None = None

    @property
    def idle(self) -> float:
        """Seconds in which nothing ran."""
        return max(0.0, self.seconds - self.busy)

    def as_result(self) -> dict[str, Any]:
        """The analysis as one JSON object."""
        return asdict(self)


def analyze(events: Events, rank: int, tool: str) -> RankProfile | None:
    """Analyze a rank's events; None if there are no events."""
    is_gpu = bool(events.kernels)
    work = [*events.kernels, *events.copies] if is_gpu else [*events.ops, *events.exchanges, *events.calls]
    steps = [one for one in events.ranges if one.name.startswith("step ")]
    if not work and not steps:
        return None
    begin = min(one.start for one in (steps or work))
    # On a GPU, kernels may end after the host has left the step.
    end = max(one.end for one in [*steps, *(work if is_gpu or not steps else ())])
    inside = [one for one in work if one.end > begin and one.start < end]
    computing, talking, copying = _kinds(events, is_gpu, begin, end)
    waits = [one for one in events.calls if WAITING.search(one.name) and begin <= one.start < end]
    waits = [Stretch(one.name, one.start, min(one.end, end)) for one in waits]
    if (
        not is_gpu and not events.ops
    ):  # Only system calls were recorded: time outside of waiting calls counts as compute.
        computing = gaps(union(waits), begin, end)
    busy = union(inside) if is_gpu else computing
    parts = [one for one in events.ranges if not one.name.startswith("step ")]
    open_ = gaps(busy, begin, end)
    return RankProfile(
        rank=rank,
        tool=tool,
        device="gpu" if is_gpu else "cpu",
        steps=len({one.name for one in steps}),
        seconds=(end - begin) / 1e6,
        busy=length(clipped(busy, begin, end)) / 1e6,
        communication=length(talking) / 1e6,
        overlapped=both(talking, computing) / 1e6,
        copies=length(copying) / 1e6,
        kernels=_kernels(events, is_gpu),
        waits=_summed(((one.name, one.end - one.start) for one in waits), MOST_WAITS),
        waiting=length(union(waits)) / 1e6,
        idle_by_part=_idle_by_part(open_, parts),
        longest_gaps=_longest(open_, parts, events),
        asker=_asker(waits, parts, events.ops),
        **_memory(events, parts),
    )


def _kinds(events: Events, is_gpu: bool, begin: float, end: float) -> tuple[Array, Array, Array]:
    """The intervals of compute, of communication and of copies."""
    if is_gpu:
        talk = [one for one in events.kernels if COMMUNICATION.search(one.name)]
        compute = [one for one in events.kernels if not COMMUNICATION.search(one.name)]
    else:
        talk, compute = events.exchanges, events.ops
    return tuple(clipped(union(each), begin, end) for each in (compute, talk, events.copies))  # type: ignore[return-value]


def _kernels(events: Events, is_gpu: bool) -> list[Named]:
    if is_gpu:
        return _summed(((one.name, one.end - one.start) for one in events.kernels), MOST_KERNELS)
    return _summed(own_time(events.ops), MOST_KERNELS)


def _summed(times: Iterable[tuple[str, float]], most: int) -> list[Named]:
    """The names with the most time, as seconds from microseconds, and one entry for all others."""
    totals: dict[str, list[float]] = {}
    for name, time in times:
        total = totals.setdefault(name, [0, 0.0])
        total[0] += 1
        total[1] += time
    return most_of([Named(name, int(count), time / 1e6) for name, (count, time) in totals.items()], most)


def most_of(named: list[Named], most: int) -> list[Named]:
    """The entries with the largest amounts, and one last entry for all others."""
    ordered = sorted(named, key=lambda each: -each.amount)
    first, rest = ordered[:most], ordered[most:]
    if rest:
        count, amount = sum(each.count for each in rest), sum(each.amount for each in rest)
        first.append(Named(f"{len(rest)} more", count, amount))
    return first


def _part_at(parts: list[Stretch], starts: Array, moment: float) -> str:
    """The part of the step that the host is in, without the micro-batch number."""
    place = int(np.searchsorted(starts, moment, side="right")) - 1
    if place < 0 or parts[place].end < moment:
        return OUTSIDE
    return parts[place].name.split(" ")[0]


def _ordered(parts: list[Stretch]) -> tuple[list[Stretch], Array]:
    ordered = sorted(parts, key=lambda one: one.start)
    return ordered, np.array([one.start for one in ordered])


def _idle_by_part(open_: Array, parts: list[Stretch]) -> dict[str, float]:
    """Idle seconds by the part of the step that the host was in."""
    ordered, starts = _ordered(parts)
    idle: dict[str, float] = {}
    for start, end in open_:
        part = _part_at(ordered, starts, (start + end) / 2)
        idle[part] = idle.get(part, 0.0) + (end - start) / 1e6
    return dict(sorted(idle.items(), key=lambda item: -item[1]))


def _longest(open_: Array, parts: list[Stretch], events: Events) -> list[tuple[str, float, str]]:
    ordered, starts = _ordered(parts)
    longest = open_[np.argsort(open_[:, 0] - open_[:, 1], kind="stable")[:MOST_GAPS]]
    host = [*events.calls, *(events.ops if events.kernels else ())]
    reported = []
    for start, end in longest:
        inside: dict[str, float] = {}
        for one in host:
            share = min(one.end, end) - max(one.start, start)
            if share > 0:
                inside[one.name] = inside.get(one.name, 0.0) + share
        doing = max(inside, key=lambda name: inside[name], default="")
        reported.append((_part_at(ordered, starts, (start + end) / 2), float(end - start) / 1e6, doing))
    return reported


def _asker(waits: list[Stretch], parts: list[Stretch], ops: list[Stretch]) -> str | None:
    """The outermost operator around, and the part of the step of, the kind of wait that took most time."""
    ordered, starts = _ordered(parts)
    outermost: list[Stretch] = []
    for op in sorted(ops, key=lambda op: (op.start, -op.end)):
        if not outermost or op.start >= outermost[-1].end:
            outermost.append(op)
    begins = np.array([op.start for op in outermost])
    waited: dict[tuple[str, str], float] = {}
    for wait in waits:
        place = int(np.searchsorted(begins, wait.start, side="right")) - 1
        part = _part_at(ordered, starts, wait.start)
        where = part if part == OUTSIDE else f"in {part}"
        if place >= 0 and wait.end <= outermost[place].end:
            where = f"by {outermost[place].name} {where}"
        waited[wait.name, where] = waited.get((wait.name, where), 0.0) + wait.end - wait.start
    most = _summed(((one.name, one.end - one.start) for one in waits), 1)
    of_most = {where: time for (name, where), time in waited.items() if name == most[0].name}
    return max(of_most, key=lambda where: of_most[where], default=None)


def _memory(events: Events, parts: list[Stretch]) -> dict[str, Any]:
    """The peak, its part of the step, and the operators that allocated most."""
    on_gpu = any(is_gpu for *_, is_gpu in events.allocations)
    mine = sorted(entry for entry in events.allocations if entry[3] == on_gpu)
    if not mine:
        return {}
    peak = max(mine, key=lambda entry: entry[2])
    ordered, starts = _ordered(parts)
    ops = sorted(events.ops, key=lambda op: op.start)
    taken: dict[str, list[float]] = {}
    place, outer = 0, []
    for moment, bytes_, _, _ in mine:
        while place < len(ops) and ops[place].start <= moment:
            outer.append(ops[place])
            place += 1
        outer = [op for op in outer if op.end >= moment]
        if bytes_ > 0:
            total = taken.setdefault(outer[0].name if outer else "outside of operators", [0, 0])
            total[0] += 1
            total[1] += bytes_
    named = [Named(name, int(count), total) for name, (count, total) in taken.items()]
    return {
        "peak_bytes": peak[2],
        "peak_part": _part_at(ordered, starts, peak[0]),
        "allocators": most_of(named, MOST_ALLOCATORS),
    }
