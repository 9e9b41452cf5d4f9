"""A trial on this machine: a command under a subreaper, whose output is read by line and logged without secrets."""

from __future__ import annotations

import os
import selectors
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from steelyard.launch import subreaper
from steelyard.tune import outcome, trial
from steelyard.tune.command import STORAGE
from steelyard.tune.objective import ObjectiveValues
from steelyard.tune.outcome import TrialEnd
from steelyard.tune.trial import TrialLimits
from steelyard.tune.trial_output import LOG, TrialLog

SECONDS_TO_END = 0.02  # poll interval between the end of the output and the exit of the process


class LocalJob:
    """A command that runs under a subreaper."""

    settling = 0.0

    def __init__(self, command: Sequence[str], log: TrialLog) -> None:
        self.log, self._kills = log, outcome.kills_by_memory()
        self._reading, writing = os.pipe()
        try:
            environment = {name: os.environ[name] for name in os.environ if name != STORAGE}
            self._process = subreaper.start(command, writing, environment)
        finally:
            os.close(writing)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._reading, selectors.EVENT_READ)

    def look(self, seconds: float) -> bool:
        """Read output for at most `seconds`; whether there was any."""
        if not self._selector.get_map():
            time.sleep(SECONDS_TO_END)
            return False
        if not self._selector.select(seconds):
            return False
        data = os.read(self._reading, 1 << 16)
        if not data:
            self._selector.unregister(self._reading)
        self.log.feed(data)
        return True

    def is_waiting(self) -> bool:
        """Never: it starts at once."""
        return False

    def is_over(self) -> bool:
        """Whether it and all its descendants have ended."""
        return self._process.code is not None

    def stop(self) -> None:
        """End it, and read the rest of the pipe, which has no writer any more."""
        try:
            self._process.stop()
        finally:
            self._selector.close()
            os.set_blocking(self._reading, False)
            try:
                while data := os.read(self._reading, 1 << 16):
                    self.log.feed(data)
            except BlockingIOError:
                pass
            finally:
                os.close(self._reading)

    def failure(self) -> tuple[str, str] | None:
        """Outcome and reason of a non-zero exit."""
        code = self._process.code or 0
        return outcome.of_exit(code, self.log.tail, outcome.kills_by_memory() > self._kills) if code else None


def run(
    command: Sequence[str],
    folder: Path,
    measured: Sequence[ObjectiveValues],
    limits: TrialLimits,
    is_behind: Callable[[], str | None] = lambda: None,
    beat: Callable[[], None] = lambda: None,
) -> TrialEnd:
    """Run a command until it ends or reaches a limit, and return how it ended."""
    log = TrialLog(folder / LOG, measured)
    return trial.run(LocalJob(command, log), log, folder, limits, is_behind, beat)
