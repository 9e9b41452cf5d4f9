"""Straggler detection: measures how long a rank computes per step, without the time it waits for other ranks.

Collectives make all ranks take as long as the slowest, so the duration of a step does not show which rank is slow. The
measurement depends on the device:

- On a CPU a waiting rank sleeps. Its own time is the CPU time of its thread plus the time the thread was runnable but
  another process had the core (`/proc`, one read per step), or the process was stopped (`watchdog.py`).
- On a GPU a collective that waits is a spinning kernel. When a record is written and the device is idle, at most every
  few seconds, each rank times a matrix product of fixed size: a GPU that is hot, throttled or shared takes longer. The
  duration of a step, which is that of the slowest rank, is scaled by this probe.

The time that a rank waits for its data is added to both, and on a GPU the time for which its process was stopped. Ranks
exchange these times only when a record is written. The median over the last minute counts, because a single step shows
what the operating system did and not what the machine can do. `data_wait` is the slowest rank's wait for data. On a CPU
a record also has `core_wait`, the seconds per step in which any rank waited for a core: other processes then make all
ranks slower. A rank is compared with the ranks of its pipeline stage, which do the same work; the only rank of a stage
is compared with its own last ten minutes.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median, median_low
from typing import Any

import torch
import torch.distributed as dist

from steelyard.core.medians import weighted_median
from steelyard.parallel.mesh import Mesh
from steelyard.training.watchdog import Watchdog

PRODUCT, PRODUCTS = 2048, 8  # 0.14 TFLOP: a fraction of a millisecond on a large GPU, a few on a small one
DELAYS = Path("/proc/thread-self/schedstat")  # this thread's time on a core and time waiting for one, in nanoseconds
SECONDS_BETWEEN_PROBES = 10.0
MINUTE, MINUTES = 60.0, 10
LEAST_TIMES = 3  # in a median, if records are rarer than that
SECONDS_BETWEEN_TIMES = 1.0  # shorter ones are averaged


class StepTimer:
    """One rank's own time. All ranks call `reported` at the same steps."""

    def __init__(self, mesh: Mesh, device: torch.device, watchdog: Watchdog) -> None:
        self.mesh, self.device, self.watchdog = mesh, device, watchdog
        self.is_on = mesh.world.size > 1
        self._compute = self._delay = self._data = self._stalled = 0.0
        self._probed, self._probe = float("-inf"), 0.0
        self._history, self._data_history = History(), History()

    @contextmanager
    def time_step(self, step: int) -> Iterator[None]:
        """Add the block's compute time, and tell the watchdog when the step has ended."""
        if not self.is_on or self.device.type != "cpu":
            yield
        else:
            before = self._thread_seconds()
            yield
            after = self._thread_seconds()
            self._compute += after[0] - before[0]
            self._delay += after[1] - before[1]
        self.watchdog.step_done(step)

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
        stalled = self.watchdog.stalled
        delayed, self._stalled = stalled - self._stalled, stalled
        if self.device.type == "cuda":
            own, waited = self._probed_time(), self._data + delayed
        else:  # A starved process has both delays.
            own, waited = (self._compute + max(self._delay, delayed)) / steps, self._data
        mine = torch.tensor([own, *(each / steps for each in (waited, self._data, self._delay))], dtype=torch.float64)
        self._compute = self._delay = self._data = 0.0
        all_ranks = [torch.zeros_like(mine) for _ in range(self.mesh.world.size)]
        dist.all_gather(all_ranks, mine)
        computed, idle, data, delays = (list(each) for each in zip(*(each.tolist() for each in all_ranks), strict=True))
        if self.device.type == "cuda":
            computed = shared_out(seconds / steps - median_low(idle), computed)
        times = [a + b for a, b in zip(computed, idle, strict=True)]
        now = time.monotonic()
        slowest = self._slowest(*self._history.add(now, times, steps))
        slowest["data_wait"] = self._data_history.add(now, data, steps)[0][int(slowest["slowest"])]
        return {"rank_seconds": slowest | ({"core_wait": sum(delays)} if self.device.type == "cpu" else {})}

    def _slowest(self, times: list[float], past: list[float]) -> dict[str, float]:
        """The rank that is slowest relative to the median of its stage, or of its own past."""
        width = len(times) // self.mesh.pipeline.size
        usual = [
            median_low(times[rank // width * width : (rank // width + 1) * width]) if width > 1 else past[rank]
            for rank in range(len(times))
        ]
        slowest = max(range(len(times)), key=lambda rank: times[rank] / max(usual[rank], 1e-9))
        return {"slowest": slowest, "seconds": times[slowest], "median": usual[slowest]}

    def _thread_seconds(self) -> tuple[float, float]:
        """Seconds that this thread ran, and that it waited for a core."""
        delay = 0
        with suppress(OSError, ValueError, IndexError):
            delay = int(DELAYS.read_bytes().split()[1])
        return time.thread_time(), delay / 1e9

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


class History:
    """The seconds per step of every rank: those of the last minute, and the medians of the minutes before.

    A value counts as long as it lasted: of a minute with ten fast steps and three that took most of the minute, the
    slow ones are the median.
    """

    def __init__(self) -> None:
        self._sums: list[float] = []
        self._steps, self._since = 0, float("-inf")
        self._last: deque[tuple[float, float, list[float]]] = deque()  # time, duration, seconds of all ranks
        self._past: deque[list[float]] = deque(maxlen=MINUTES)
        self._passed = float("-inf")
        self._is_first = True

    def add(self, now: float, times: list[float], steps: int) -> tuple[list[float], list[float]]:
        """Add the seconds per step of all ranks. Returns each rank's median of a minute, and of ten minutes before."""
        self._sums = [a + steps * b for a, b in zip(self._sums or [0.0] * len(times), times, strict=True)]
        self._steps += steps
        if now - self._since >= SECONDS_BETWEEN_TIMES:
            lasted = min(now - self._since, MINUTE / LEAST_TIMES) if self._last else SECONDS_BETWEEN_TIMES
            if self._is_first and self._last:  # Its steps filled caches.
                self._last.clear()
                self._is_first = False
            self._last.append((now, lasted, [each / self._steps for each in self._sums]))
            self._sums, self._steps, self._since = [], 0, now
        while len(self._last) > LEAST_TIMES and now - self._last[0][0] > MINUTE:
            self._last.popleft()
        weights = [lasted for _, lasted, _ in self._last]
        own = [weighted_median(each, weights) for each in zip(*(row for *_, row in self._last), strict=True)]
        past = [median(each) for each in zip(*self._past, strict=True)] if self._past else own
        if now - self._passed >= MINUTE and len(self._last) >= LEAST_TIMES:
            self._past.append(own)
            self._passed = now
        return own, past


def shared_out(seconds: float, probes: list[float]) -> list[float]:
    """The seconds of a step that each rank needs on its own, if devices differ as their probes do.

    All ranks wait for the slowest, so the step takes as long as the slowest rank needs, and the others need less.
    """
    slowest = max(max(probes), 1e-9)
    return [max(0.0, seconds) * probe / slowest for probe in probes]
