"""Polls the scheduler and updates `scheduler.jsonl`, at most once every `SECONDS_BETWEEN` seconds."""

from __future__ import annotations

import time
from pathlib import Path

from steelyard.core.console import console
from steelyard.core.errors import SteelyardError
from steelyard.launch import launch_record
from steelyard.observe.run_state import LAUNCH, RunState

SECONDS_BETWEEN = 10.0


class SchedulerPoll:
    """Polls for one run. A scheduler that does not answer is warned about once; the run folder is still shown."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._polled: float | None = None
        self._has_warned = False

    def update(self, state: RunState) -> None:
        """Poll if it is due. Records that cannot be written, as in a read-only folder, go to `state.unwritten`."""
        now = time.monotonic()
        if self._polled is not None and now - self._polled < SECONDS_BETWEEN:
            return
        self._polled = now
        if not (self.path / LAUNCH).is_file():
            return
        try:
            records = launch_record.refresh(self.path)
            state.unwritten = records[len(launch_record.read_records(self.path)) :]
        except (SteelyardError, OSError) as error:
            if not self._has_warned:
                console.warn(f"cannot poll the scheduler: {error}")
            self._has_warned = True
