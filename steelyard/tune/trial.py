"""Follows one trial until it ends, and stops it if it takes too long, hangs or is far behind.

A trial is a `TrialJob`: a command on this machine (`local_trial.py`), or a job submitted to a backend
(`submitted_trial.py`). Records are read from the run's `metrics.jsonl` while it grows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from steelyard.core.run import METRICS
from steelyard.tune import outcome
from steelyard.tune.objective import ObjectiveValues
from steelyard.tune.outcome import TrialEnd
from steelyard.tune.trial_output import Metrics, TrialLog

RUN = "run"
SECONDS_BETWEEN_LOOKS = 0.25
SECONDS_BETWEEN_BEATS = 5.0


@dataclass(frozen=True)
class TrialLimits:
    """Time limits of a trial, in seconds: total, and without output."""

    timeout: float
    hang: float
    deadline: float = float("inf")
    """End of the study, on the monotonic clock."""

    def reached(self, began: float, heard: float) -> tuple[str, str] | None:
        """Outcome and reason if a trial with this start and this last output must end now; otherwise None."""
        now = time.monotonic()
        if now - began > self.timeout:
            return outcome.TIMED_OUT, f"not finished after {self.timeout:g} s"
        if now > self.deadline:
            return outcome.CUT_SHORT, "the study's hours were over"
        if now - heard > self.hang:
            return outcome.HUNG, f"no output and no record for {self.hang:g} s"
        return None


class TrialJob(Protocol):
    """A running trial, which writes its output to a log."""

    settling: float
    """Seconds until its last writes are visible here; not zero on a network filesystem."""

    def look(self, seconds: float) -> bool:
        """Read output for at most `seconds`; whether there was any."""

    def is_waiting(self) -> bool:
        """Whether it has not started: time in a queue does not count."""

    def is_over(self) -> bool:
        """Whether it has ended."""

    def stop(self) -> None:
        """End it if it still runs, and read the rest of its output."""

    def failure(self) -> tuple[str, str] | None:
        """Outcome and reason if it failed by itself; otherwise None."""


def run(
    job: TrialJob,
    log: TrialLog,
    folder: Path,
    limits: TrialLimits,
    is_behind: Callable[[], str | None] = lambda: None,
    beat: Callable[[], None] = lambda: None,
) -> TrialEnd:
    """Follow a job until it ends or reaches a limit, and return how it ended. An interruption also ends it."""
    metrics = Metrics(folder / RUN / METRICS, log.measured)
    clock = Clock()
    try:
        verdict = _watch(job, metrics, limits, clock, is_behind, beat)
        if verdict is None:
            _settle(job, metrics, log.measured)
    finally:
        job.stop()  # Also after an interruption.
        metrics.look()
        log.close()
    verdict = verdict or job.failure()
    missing = next((why for each in log.measured if (why := each.missing()) is not None), None)
    if verdict is None and missing is not None:
        verdict = outcome.of_silence(missing, log.tail)
    return TrialEnd(*(verdict or (outcome.FINISHED, "")), clock.seconds)


class Clock:
    """The start of a trial, and the time of its last output."""

    def __init__(self) -> None:
        self.began = self.heard = self.last = time.monotonic()

    @property
    def seconds(self) -> float:
        """Run time so far."""
        return self.last - self.began

    def tick(self, is_waiting: bool, was_heard: bool) -> None:
        """Update the times to now."""
        self.last = time.monotonic()
        self.began = self.last if is_waiting else self.began
        self.heard = self.last if is_waiting or was_heard else self.heard


def _watch(
    job: TrialJob,
    metrics: Metrics,
    limits: TrialLimits,
    clock: Clock,
    is_behind: Callable[[], str | None],
    beat: Callable[[], None],
) -> tuple[str, str] | None:
    """Follow the job until it ends; or return the outcome and reason with which it must be stopped."""
    looked = beaten = time.monotonic()
    while not job.is_over():
        was_heard, now = job.look(SECONDS_BETWEEN_LOOKS), time.monotonic()
        if now - looked >= SECONDS_BETWEEN_LOOKS:
            looked, was_heard = now, metrics.look() or was_heard
            behind = is_behind()
            if behind is not None:
                return outcome.STOPPED_EARLY, behind
        if now - beaten > SECONDS_BETWEEN_BEATS:
            beat()
            beaten = now
        clock.tick(job.is_waiting(), was_heard)
        reached = limits.reached(clock.began, clock.heard)
        if reached is not None:
            return reached
    return None


def _settle(job: TrialJob, metrics: Metrics, measured: Sequence[ObjectiveValues]) -> None:
    """Wait for the last records of a job on another host."""
    deadline = time.monotonic() + job.settling
    metrics.look()
    while any(each.value is None for each in measured) and time.monotonic() < deadline:
        if job.failure() is not None:
            return
        job.look(SECONDS_BETWEEN_LOOKS)
        metrics.look()
