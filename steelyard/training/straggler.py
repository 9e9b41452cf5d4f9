"""Straggler detection: measures how long a rank computes per step, without the time it waits for other ranks.

Collectives make all ranks take as long as the slowest, so the duration of a step does not show which rank is slow. The
measurement depends on the device:

- On a CPU a waiting rank sleeps. Its own time is the CPU time of its thread plus the time the thread was runnable but
  another process had the core (`/proc`, one read per step).
- On a GPU a collective that waits is a spinning kernel. When a record is written and the device is idle, at most every
  few seconds, each rank times a matrix product of fixed size: a GPU that is hot, throttled or shared takes longer. The
  duration of a step, which is that of the slowest rank, is scaled by this probe.

The time that a rank waits for its data is added to both. Ranks exchange these times only when a record is written. A
rank is compared with the ranks of its pipeline stage, which do the same work; the only rank of a stage is compared with
its own past.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median_low
from typing import Any

import torch
import torch.distributed as dist

from steelyard.parallel.mesh import Mesh

PRODUCT, PRODUCTS = 2048, 8  # 0.14 TFLOP: a fraction of a millisecond on a large GPU, a few on a small one
DELAYS = Path("/proc/thread-self/schedstat")  # this thread's time on a core and time waiting for one, in nanoseconds
SECONDS_BETWEEN_PROBES = 10.0
REMEMBERED = 20


class StepTimer:
    """One rank's own time. All ranks call `reported` at the same steps."""

    def __init__(self, mesh: Mesh, device: torch.device) -> None:
        self.mesh, self.device = mesh, device
        self.is_on = mesh.world.size > 1
        self._compute = self._data = 0.0
        self._probed, self._probe = float("-inf"), 0.0
        self._past: list[deque[float]] = [deque(maxlen=REMEMBERED) for _ in range(mesh.world.size)]

    @contextmanager
    def time_step(self) -> Iterator[None]:
        """Add the block's compute time."""
        if not self.is_on or self.device.type != "cpu":
            yield
            return
        before = self._runnable_seconds()
        yield
        self._compute += self._runnable_seconds() - before

    @contextmanager
    def time_data(self) -> Iterator[None]:
        """Add the time that the block waits for data."""
        before = time.perf_counter()
        yield
        self._data += time.perf_counter() - before

    def reported(self, seconds: float, steps: int) -> dict[str, Any]:
        """The slowest rank and its seconds per step, for a record; empty with one rank."""
        if not self.is_on:
            return {}
        own = self._probed_time() if self.device.type == "cuda" else self._compute / steps
        mine = torch.tensor([own, self._data / steps], dtype=torch.float64)
        self._compute = self._data = 0.0
        all_ranks = [torch.zeros_like(mine) for _ in range(self.mesh.world.size)]
        dist.all_gather(all_ranks, mine)
        computed, waited = (list(each) for each in zip(*(each.tolist() for each in all_ranks), strict=True))
        if self.device.type == "cuda":
            computed = shared_out(seconds / steps - median_low(waited), computed)
        return {"rank_seconds": self._slowest([a + b for a, b in zip(computed, waited, strict=True)])}

    def _slowest(self, times: list[float]) -> dict[str, float]:
        """The rank that is slowest relative to the median of its stage, or of its own past."""
        width = len(times) // self.mesh.pipeline.size
        usual: list[float] = []
        for rank, own in enumerate(times):
            stage = rank // width
            past = self._past[rank]
            usual.append(median_low(times[stage * width : (stage + 1) * width] if width > 1 else past or [own]))
            past.append(own)
        slowest = max(range(len(times)), key=lambda rank: times[rank] / max(usual[rank], 1e-9))
        return {"slowest": slowest, "seconds": times[slowest], "median": usual[slowest]}

    def _runnable_seconds(self) -> float:
        """Seconds that this thread ran or was runnable."""
        delay = 0
        with suppress(OSError, ValueError, IndexError):
            delay = int(DELAYS.read_bytes().split()[1])
        return time.thread_time() + delay / 1e9

    def _probed_time(self) -> float:
        """Seconds for a few matrix products of fixed size; measured again every few seconds."""
        now = time.monotonic()
        if now - self._probed >= SECONDS_BETWEEN_PROBES:
            self._probed = now
            with suppress(torch.OutOfMemoryError):  # A run that barely fits must not fail because of the probe.
                self._probe = self._measured()
        return self._probe

    def _measured(self) -> float:
        """Run the probe on an idle device and return its seconds."""
        x = torch.ones(PRODUCT, PRODUCT, dtype=torch.bfloat16, device=self.device)
        y = torch.empty_like(x)
        torch.mm(x, x, out=y)  # The first one may load a kernel.
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(PRODUCTS):
            torch.mm(x, x, out=y)
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000


def shared_out(seconds: float, probes: list[float]) -> list[float]:
    """The seconds of a step that each rank needs on its own, if devices differ as their probes do.

    All ranks wait for the slowest, so the step takes as long as the slowest rank needs, and the others need less.
    """
    slowest = max(max(probes), 1e-9)
    return [max(0.0, seconds) * probe / slowest for probe in probes]
