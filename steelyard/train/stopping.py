"""Stopping when asked: the first Ctrl-C or SIGTERM ends the run after its step, a second one at once."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from steelyard.core.console import console
from steelyard.core.errors import Interrupted

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Whether someone asked the run to stop."""

    asked = False

    def ask(self, number: int, frame: FrameType | None) -> None:
        """The handler of both signals."""
        if self.asked:
            raise Interrupted
        self.asked = True
        console.say("stopping after this step; ask again to stop at once")


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
