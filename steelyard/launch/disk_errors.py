"""Errors of the filesystem in the supervisor of an elastic run: it logs them and goes on.

A full or failing disk must not end a run whose ranks train. A record is left out; what an attempt needs is written as
soon as the disk allows. The log itself may be on that disk.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from steelyard.core.console import console

SECONDS_BETWEEN_TRIES = 1.0


def say(message: str) -> None:
    """Print a message, if the log can be written."""
    with suppress(OSError):
        console.say(message)


@contextmanager
def logged(what: str) -> Iterator[None]:
    """Log an error of the filesystem in the block."""
    try:
        yield
    except OSError as error:
        say(f"warning: {what} cannot be written ({error.strerror or error}); the run goes on without it")


def until_done(write: Callable[[], None], what: str, stop_signals: list[int]) -> bool:
    """Call `write` until it has no error of the filesystem; False if a stop signal arrives first."""
    reported = ""
    while True:
        try:
            write()
            return True
        except OSError as error:
            if (reason := error.strerror or str(error)) != reported:
                say(f"warning: {what} cannot be written ({reason}); tries again until it can")
                reported = reason
        if stop_signals:
            return False
        time.sleep(SECONDS_BETWEEN_TRIES)
