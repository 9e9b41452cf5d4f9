"""Graceful stop: the first SIGINT, SIGTERM or SIGUSR1 ends the run after the current step, a second one immediately.

A scheduler may signal only some ranks, or signal them during different steps, so the ranks all-reduce a flag once per
step. No rank waits for the others then: the all-reduce starts after a step, and its result is read after the next one.
So several ranks stop one step later than a single process does. In a validation, which is then discarded, they wait
for an all-reduce before every batch. A signal within a second of the first is the same request by another path
(terminal, launcher, scheduler).
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch
import torch.distributed as dist

from steelyard.core.console import console
from steelyard.core.errors import Interrupted

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
SAME_REQUEST_SECONDS = 1.0


class StopRequest:
    """Whether the run has been requested to stop."""

    is_requested = False
    requested_at = 0.0
    agreed_by_clock = False
    unit = "step"
    """What still ends before the run stops, for the message."""

    def __init__(self) -> None:
        self._is_agreed = False
        self._pending: tuple[torch.Tensor, dist.Work | None] | None = None
        if dist.is_initialized():
            self.unit = "step or the next one"

    def handle(self, number: int, frame: FrameType | None) -> None:
        """The signal handler."""
        if self.is_requested:
            if time.monotonic() - self.requested_at > SAME_REQUEST_SECONDS:
                raise Interrupted
            return
        self.is_requested, self.requested_at = True, time.monotonic()
        console.say(f"stopping after this {self.unit}; send the signal again to stop immediately")

    @contextmanager
    def during(self, unit: str) -> Iterator[None]:
        """Name what the block repeats, and after which the ranks agree."""
        before, self.unit = self.unit, unit
        try:
            yield
        finally:
            self.unit = before

    def agreed(self) -> bool:
        """Whether any rank has a request. All ranks call this at the same places, and wait for each other."""
        if not self.finish():
            self._begin(out_of_time=False)
        return self.finish()

    def agreed_after_step(self, out_of_time: bool) -> bool:
        """Whether any rank had a request, or was out of time, after the previous step; a single process: after this."""
        if self.finish():
            return True
        self._begin(out_of_time)
        return not dist.is_initialized() and self.finish()

    def _begin(self, out_of_time: bool) -> None:
        flags = torch.tensor([self.is_requested, out_of_time], dtype=torch.int32)
        work = dist.all_reduce(flags, op=dist.ReduceOp.MAX, async_op=True) if dist.is_initialized() else None
        self._pending = flags, work

    def finish(self) -> bool:
        """Wait for the all-reduce that has begun. Returns whether the ranks have agreed to stop, now or before."""
        if self._pending is not None:
            flags, work = self._pending
            if work is not None:
                work.wait()
            self._pending = None
            is_requested, self.agreed_by_clock = (bool(flag) for flag in flags)
            self._is_agreed |= is_requested or self.agreed_by_clock
        return self._is_agreed


@contextmanager
def stop_request() -> Iterator[StopRequest]:
    """Handle the stop signals during the block."""
    request = StopRequest()
    previous = {number: signal.signal(number, request.handle) for number in SIGNALS}
    try:
        yield request
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
