"""What a profiler saw of one rank, whichever profiler it was: stretches of time with a name, in microseconds."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from steelyard.observe.spans import Array

# Collective operations by the names that NCCL's kernels, gloo and torch give them.
COMMUNICATION = re.compile(r"nccl|gloo|c10d|symm_mem|nvshmem|allreduce|all_reduce|all_gather|reduce_scatter", re.I)
# Host calls that wait for the device, or for somebody else.
WAITING = re.compile(
    r"(Stream|Device|Event|Ctx)Synchronize|^cudaMemcpy(_v\d+)?$|^cuda(Malloc|Free)(_v\d+)?$|^cudaHost(Alloc|Unregister)"
    r"|^pthread_cond|^pthread_join|^sem_|^poll$|^epoll|^select$|^futex|^read$|^recv|^fsync"
)


@dataclass(frozen=True)
class Stretch:
    """Something that lasted."""

    name: str
    start: float
    end: float


@dataclass
class Events:
    """All stretches of one rank by kind. Without kernels it is a processor's trace, and `ops` are what it computed."""

    kernels: list[Stretch] = field(default_factory=list)
    copies: list[Stretch] = field(default_factory=list)
    calls: list[Stretch] = field(default_factory=list)
    """Of the host into CUDA's runtime or the system."""
    ops: list[Stretch] = field(default_factory=list)
    """Operators on the host, of the thread that calls them; they nest."""
    exchanges: list[Stretch] = field(default_factory=list)
    """Communication of processors, on whatever thread."""
    ranges: list[Stretch] = field(default_factory=list)
    """Named by the training loop: `step 10`, `forward 3`."""
    allocations: list[tuple[float, int, int, bool]] = field(default_factory=list)
    """Moment, bytes (negative when given back), bytes held then, and whether on a GPU."""


def union(stretches: Iterable[Stretch]) -> Array:
    """The moments that any of the stretches covers, as rows of start and end that do not touch."""
    rows = np.array([(one.start, one.end) for one in stretches], dtype=np.float64).reshape(-1, 2)
    if not len(rows):
        return rows
    rows = rows[np.argsort(rows[:, 0], kind="stable")]
    reach = np.maximum.accumulate(rows[:, 1])
    begins = np.concatenate([[True], rows[1:, 0] > reach[:-1]])
    ends = np.concatenate([begins[1:], [True]])
    return np.stack([rows[begins, 0], reach[ends]], axis=1)


def length(rows: Array) -> float:
    """How long a union is."""
    return float((rows[:, 1] - rows[:, 0]).sum())


def clipped(rows: Array, start: float, end: float) -> Array:
    """The part of a union between two moments."""
    cut = np.clip(rows, start, end)
    return cut[cut[:, 1] > cut[:, 0]]


def both(one: Array, other: Array) -> float:
    """How long two unions cover the same moments."""
    together = np.concatenate([one, other])
    joined = union(Stretch("", start, end) for start, end in together)
    return length(one) + length(other) - length(joined)


def gaps(rows: Array, start: float, end: float) -> Array:
    """The moments between two that a union leaves open."""
    rows = clipped(rows, start, end)
    starts, ends = np.concatenate([[start], rows[:, 1]]), np.concatenate([rows[:, 0], [end]])
    open_ = np.stack([starts, ends], axis=1)
    return open_[open_[:, 1] > open_[:, 0]]


def own_time(ops: list[Stretch]) -> list[tuple[str, float]]:
    """Each operator's time less that of those inside it, for operators of one thread."""
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
