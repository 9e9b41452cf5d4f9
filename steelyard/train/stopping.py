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

    def ask(self, number: int, frame: FrameType | None) -> None:
        """The handler of the signals."""
        if self.asked:
            if time.monotonic() - self.asked_at > SAME_REQUEST_SECONDS:
                raise Interrupted
            return
        self.asked, self.asked_at = True, time.monotonic()
        console.say("stopping after this step; ask again to stop at once")

    def agreed(self) -> bool:
        """Whether any rank was asked. Every rank calls this once per step and gets the same answer."""
        if not dist.is_initialized():
            return self.asked
        flag = torch.tensor(int(self.asked))
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag)


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
