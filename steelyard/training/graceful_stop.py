"""Stopping when asked: the first SIGINT, SIGTERM or SIGUSR1 ends the run after its step, a second one at once.

A scheduler may tell only some ranks, or tell them during different steps, so the ranks agree once per step. What comes
within a second of the first request is the same request over another road (terminal, launcher, scheduler).
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
    """Whether someone asked the run to stop."""

    asked = False
    asked_at = 0.0
    agreed_by_clock = False

    def ask(self, number: int, frame: FrameType | None) -> None:
        """The handler of the signals."""
        if self.asked:
            if time.monotonic() - self.asked_at > SAME_REQUEST_SECONDS:
                raise Interrupted
            return
        self.asked, self.asked_at = True, time.monotonic()
        console.say("stopping after this step; ask again to stop at once")

    def agreed(self, out_of_time: bool = False) -> bool:
        """Whether any rank was asked, or sees its time run out. All ranks call this once per step, and agree."""
        flags = torch.tensor([self.asked, out_of_time], dtype=torch.int32)
        if dist.is_initialized():
            dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        was_asked, self.agreed_by_clock = (bool(flag) for flag in flags)
        return was_asked or self.agreed_by_clock


@contextmanager
def stop_request() -> Iterator[StopRequest]:
    """Listen for requests during the block."""
    request = StopRequest()
    previous = {number: signal.signal(number, request.ask) for number in SIGNALS}
    try:
        yield request
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
