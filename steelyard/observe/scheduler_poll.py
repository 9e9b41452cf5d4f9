"""Asking the scheduler now and then, so that `scheduler.jsonl` knows what it says; no more often than is polite."""

from __future__ import annotations

import time
from pathlib import Path

from steelyard.core.console import console
from steelyard.core.errors import SteelyardError
from steelyard.launch import launch_record
from steelyard.observe.run_state import LAUNCH, RunState

SECONDS_BETWEEN = 10.0


class Asking:
    """Asks for one run. A scheduler that does not answer is told of once; what the folder says still stands."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._asked: float | None = None
        self._has_told = False

    def ask(self, state: RunState) -> None:
        """Ask, if it is time. A state is told what could not be written down: the folder may only be read, perhaps."""
        now = time.monotonic()
        if self._asked is not None and now - self._asked < SECONDS_BETWEEN:
            return
        self._asked = now
        if not (self.path / LAUNCH).is_file():
            return
        try:
            records = launch_record.refresh(self.path)
            state.unwritten = records[len(launch_record.read_records(self.path)) :]
        except (SteelyardError, OSError) as error:
            if not self._has_told:
                console.warn(f"the scheduler was not asked: {error}")
            self._has_told = True
