"""Garbage collection at fixed steps.

Python collects when enough objects were allocated, at another moment on every rank. A rank that collects makes all
others wait at their next collective. During training the automatic collection is off, and all ranks collect after the
same steps.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

YOUNG_EVERY, ALL_EVERY = 50, 1000  # Steps. A collection of all generations also visits what the libraries imported.


@contextmanager
def at_fixed_steps() -> Iterator[Callable[[int], None]]:
    """A function to call after each step with its number. The automatic collection is off during the block."""

    def collect(step: int) -> None:
        if step % ALL_EVERY == 0:
            gc.collect()
        elif step % YOUNG_EVERY == 0:
            gc.collect(1)

    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield collect
    finally:
        if was_enabled:
            gc.enable()
