"""Graceful stop: the first SIGINT, SIGTERM or SIGUSR1 ends the run after the current step, a second one immediately.

A scheduler may signal only some ranks, or signal them during different steps, so the ranks agree once per step, and in
a validation, which is then discarded, once per batch. A signal within a second of the first is the same request by
another path (terminal, launcher, scheduler).
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

    def agreed(self, out_of_time: bool = False) -> bool:
        """Whether any rank has a request or is out of time. All ranks call this at the same places."""
        flags = torch.tensor([self.is_requested, out_of_time], dtype=torch.int32)
        if dist.is_initialized():
            dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        is_requested, self.agreed_by_clock = (bool(flag) for flag in flags)
        return is_requested or self.agreed_by_clock


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
