"""The events of one rank, independent of the profiler: named time intervals, in microseconds."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from steelyard.observe.spans import Array

# Communication, by the names of NCCL's kernels, gloo and torch.
COMMUNICATION = re.compile(r"nccl|gloo|c10d|symm_mem|nvshmem|allreduce|all_reduce|all_gather|reduce_scatter", re.I)
# Host calls that wait for the device or for another process.
WAITING = re.compile(
    r"(Stream|Device|Event|Ctx)Synchronize|^cudaMemcpy(_v\d+)?$|^cuda(Malloc|Free)(_v\d+)?$|^cudaHost(Alloc|Unregister)"
    r"|^pthread_cond|^pthread_join|^sem_|^poll$|^epoll|^select$|^futex|^read$|^recv|^fsync"
)


@dataclass(frozen=True)
class Stretch:
    """A named interval."""

    name: str
    start: float
    end: float


@dataclass
class Events:
    """All intervals of one rank by kind. A trace without kernels is of a CPU, and `ops` are its compute."""

    kernels: list[Stretch] = field(default_factory=list)
    copies: list[Stretch] = field(default_factory=list)
    calls: list[Stretch] = field(default_factory=list)
    """Host calls of the CUDA runtime or of the operating system."""
    ops: list[Stretch] = field(default_factory=list)
    """Operators of the main thread on the host; they nest."""
    exchanges: list[Stretch] = field(default_factory=list)
    """Communication on a CPU, of any thread."""
    ranges: list[Stretch] = field(default_factory=list)
    """Ranges of the training loop: `step 10`, `forward 3`."""
    allocations: list[tuple[float, int, int, bool]] = field(default_factory=list)
    """Time, bytes (negative for a free), total allocated bytes, and whether on a GPU."""


def union(stretches: Iterable[Stretch]) -> Array:
    """The union of the intervals, as disjoint rows of start and end."""
    rows = np.array([(one.start, one.end) for one in stretches], dtype=np.float64).reshape(-1, 2)
    if not len(rows):
        return rows
    rows = rows[np.argsort(rows[:, 0], kind="stable")]
    reach = np.maximum.accumulate(rows[:, 1])
    begins = np.concatenate([[True], rows[1:, 0] > reach[:-1]])
    ends = np.concatenate([begins[1:], [True]])
    return np.stack([rows[begins, 0], reach[ends]], axis=1)


def length(rows: Array) -> float:
    """Total length of a union."""
    return float((rows[:, 1] - rows[:, 0]).sum())


def clipped(rows: Array, start: float, end: float) -> Array:
    """The part of a union between two times."""
    cut = np.clip(rows, start, end)
    return cut[cut[:, 1] > cut[:, 0]]


def both(one: Array, other: Array) -> float:
    """Length of the intersection of two unions."""
    together = np.concatenate([one, other])
    joined = union(Stretch("", start, end) for start, end in together)
    return length(one) + length(other) - length(joined)


def gaps(rows: Array, start: float, end: float) -> Array:
    """The intervals between two times that a union does not cover."""
    rows = clipped(rows, start, end)
    starts, ends = np.concatenate([[start], rows[:, 1]]), np.concatenate([rows[:, 0], [end]])
    open_ = np.stack([starts, ends], axis=1)
    return open_[open_[:, 1] > open_[:, 0]]


def own_time(ops: list[Stretch]) -> list[tuple[str, float]]:
    """Self time of each operator: its time without that of nested ones, for operators of one thread."""
    ordered = sorted(ops, key=lambda op: (op.start, -op.end))
    own = [op.end - op.start for op in ordered]
    outer: list[int] = []
    for place, op in enumerate(ordered):
        while outer and ordered[outer[-1]].end <= op.start:
            outer.pop()
        if outer:
            own[outer[-1]] -= op.end - op.start
        outer.append(place)
    return [(op.name, max(0.0, time)) for op, time in zip(ordered, own, strict=True)]
