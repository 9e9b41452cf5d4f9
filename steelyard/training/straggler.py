"""Who is slow: how long a rank computes for a step, apart from how long it waits for others.

Ranks meet in every step, so that all of them take as long as the slowest, and the length of a step tells nothing about
who that is. What tells it depends on the device:

- On a CPU a rank that waits sleeps. Its own time is what its thread ran, and what it waited for a core that somebody
  else had (`/proc`, one read per step).
- On a GPU waiting for another rank is a kernel that spins. Now and then, when a record is written and the device is
  known to have nothing to do, each rank times a product of fixed size on it: a GPU that is hot, throttled or shared
  takes longer. The length of a step, which is the slowest rank's, is shared out by that measure.

To both is added what a rank waited for its data. The ranks tell each other when a record is written, and at no other
time. A rank is compared with those of its pipeline stage, which do the same; a stage's only rank with its own past.
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
    """One rank's own time. All ranks call `told` at the same steps."""

    def __init__(self, mesh: Mesh, device: torch.device) -> None:
        self.mesh, self.device = mesh, device
        self.is_on = mesh.world.size > 1
        self._compute = self._data = 0.0
        self._probed, self._probe = float("-inf"), 0.0
        self._past: list[deque[float]] = [deque(maxlen=REMEMBERED) for _ in range(mesh.world.size)]

    @contextmanager
    def of_a_step(self) -> Iterator[None]:
        """Count what the block computes."""
        if not self.is_on or self.device.type != "cpu":
            yield
            return
        before = self._own()
        yield
        self._compute += self._own() - before

    @contextmanager
    def of_data(self) -> Iterator[None]:
        """Count how long the block waits for data."""
        before = time.perf_counter()
        yield
        self._data += time.perf_counter() - before

    def reported(self, seconds: float, steps: int) -> dict[str, Any]:
        """Which rank computes longest for a step, given how long a step took; nothing where a rank is alone."""
        if not self.is_on:
            return {}
        own = self._probed_time() if self.device.type == "cuda" else self._compute / steps
        mine = torch.tensor([own, self._data / steps], dtype=torch.float64)
        self._compute = self._data = 0.0
        everyone = [torch.zeros_like(mine) for _ in range(self.mesh.world.size)]
        dist.all_gather(everyone, mine)
        computed, waited = (list(each) for each in zip(*(each.tolist() for each in everyone), strict=True))
        if self.device.type == "cuda":
            computed = shared_out(seconds / steps - median_low(waited), computed)
        return {"rank_seconds": self._slowest([a + b for a, b in zip(computed, waited, strict=True)])}

    def _slowest(self, times: list[float]) -> dict[str, float]:
        """The rank that takes longest compared with what is usual for what it does."""
        width = len(times) // self.mesh.pipeline.size
        usual: list[float] = []
        for rank, own in enumerate(times):
            stage = rank // width
            past = self._past[rank]
            usual.append(median_low(times[stage * width : (stage + 1) * width] if width > 1 else past or [own]))
            past.append(own)
        slowest = max(range(len(times)), key=lambda rank: times[rank] / max(usual[rank], 1e-9))
        return {"slowest": slowest, "seconds": times[slowest], "median": usual[slowest]}

    def _own(self) -> float:
        """Seconds that this thread ran, or could have if somebody else had not."""
        delay = 0
        with suppress(OSError, ValueError, IndexError):
            delay = int(DELAYS.read_bytes().split()[1])
        return time.thread_time() + delay / 1e9

    def _probed_time(self) -> float:
        """Seconds for a few products of fixed size; measured anew every few seconds."""
        now = time.monotonic()
        if now - self._probed >= SECONDS_BETWEEN_PROBES:
            self._probed = now
            with suppress(torch.OutOfMemoryError):  # A run that just fits must not fail for being measured.
                self._probe = self._measured()
        return self._probe

    def _measured(self) -> float:
        """Seconds of the products now; the device has nothing else to do."""
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
    """What a step that takes so long costs each rank by itself, if its devices differ as their probes do.

    All wait for the slowest, so the step is as long as that one needs, and the others need less.
    """
    slowest = max(max(probes), 1e-9)
    return [max(0.0, seconds) * probe / slowest for probe in probes]
