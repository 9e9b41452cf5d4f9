"""Timeline of a rank's work within a step, for the steps in `log.timeline`.

    timeline/rank-00000.jsonl    one object per span: step, name, stage, micro_batch, start_ns, end_ns

Times are on rank 0's clock. Each mark ends the span before it. On a GPU a mark is an event in the stream, so that it
shows when the work ran and not when it was launched.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from steelyard.core import files
from steelyard.core.safe_parse import loads

PINGS = 8


class Ranges(Protocol):
    """A profiler's consecutive named ranges."""

    def next(self, name: str) -> None:
        """End the open range and begin this one."""


class Timeline:
    """Collects marks while it is on, and forwards them to a profiler's ranges; otherwise a mark costs nothing."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_on = False
        self.ranges: Ranges | None = None
        self._marks: list[tuple[str, int, int, Any]] = []
        self._offset: int | None = None

    @property
    def is_wanted(self) -> bool:
        """Whether marks are used."""
        return self.is_on or self.ranges is not None

    def begin(self) -> None:
        """Collect the marks of a step."""
        if self._offset is None:
            self._offset = clock_offset()
        self.is_on = True
        self._marks = []
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self._begun = time.time_ns()
        self.mark("data")

    def mark(self, name: str, stage: int = -1, micro_batch: int = -1) -> None:
        """Begin a span."""
        if self.is_on:
            self._marks.append((name, stage, micro_batch, self._now()))
        if self.ranges is not None:
            self.ranges.next(name if micro_batch < 0 else f"{name} {micro_batch}")

    def end(self, step: int, folder: Path, rank: int) -> None:
        """Write the collected spans."""
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / f"rank-{rank:05d}.jsonl", "a", encoding="utf-8") as file:
            for entry in self.spans(step):
                file.write(json.dumps(entry) + "\n")

    def spans(self, step: int) -> list[dict[str, Any]]:
        """End the step and return its spans, in the order of their marks."""
        self.mark("end")
        self.is_on = False
        times = [self._nanoseconds(at) for *_, at in self._marks]
        return [
            {"step": step, "name": name, "stage": stage, "micro_batch": micro_batch, "start_ns": start, "end_ns": end}
            for (name, stage, micro_batch, _), start, end in zip(self._marks, times, times[1:], strict=False)
        ]

    @property
    def open_span(self) -> int:
        """The index of the span that is open."""
        return len(self._marks) - 1

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return time.time_ns()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _nanoseconds(self, at: Any) -> int:
        offset = self._offset or 0
        if self.device.type != "cuda":
            return int(at) + offset
        at.synchronize()
        first = self._marks[0][3]
        return self._begun + int(first.elapsed_time(at) * 1e6) + offset


def forget_after(folder: Path, step: int) -> None:
    """Drop the spans of steps that a resumed run will repeat, and truncated lines of a killed run."""
    for path in folder.glob("rank-*.jsonl"):
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
        files.write_text(path, "".join(line for line in lines if line.endswith("\n") and _is_before(line, step)))


def _is_before(line: str, step: int) -> bool:
    """Whether a span belongs to `step` or earlier; false for damaged lines (zeros, truncated) after a crash."""
    try:
        return bool(loads(line)["step"] <= step)
    except (ValueError, KeyError, TypeError):
        return False


def clock_offset() -> int:
    """Nanoseconds to add to this host's clock to get rank 0's, from the fastest of a few round trips."""
    if not dist.is_initialized():
        return 0
    rank, best = dist.get_rank(), (1 << 62, 0)
    answer = torch.zeros(1, dtype=torch.int64)
    for peer in range(1, dist.get_world_size()):
        for _ in range(PINGS):
            if rank == 0:
                dist.recv(answer, src=peer)
                answer[0] = time.time_ns()
                dist.send(answer, dst=peer)
            elif rank == peer:
                sent = time.time_ns()
                dist.send(answer, dst=0)
                dist.recv(answer, src=0)
                received = time.time_ns()
                best = min(best, (received - sent, int(answer) - (sent + received) // 2))
    return best[1]
