"""One trial, watched until it ends or must: when it takes too long, says nothing for too long, or is far behind.

What runs is a `Job`: a command beside the tuner (`local_trial.py`), or one that was submitted to a backend
(`submitted_trial.py`). Records are read from the run's `metrics.jsonl` as they come.
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
    """Seconds that a trial may take, and may say nothing."""

    timeout: float
    hang: float
    deadline: float = float("inf")
    """When, on the monotonic clock, the whole study must end."""

    def reached(self, began: float, heard: float) -> tuple[str, str] | None:
        """The outcome and reason of a trial that began then and was heard of then, where it must end now."""
        now = time.monotonic()
        if now - began > self.timeout:
            return outcome.TIMED_OUT, f"not done after {self.timeout:g} s"
        if now > self.deadline:
            return outcome.CUT_SHORT, "the study's hours were over"
        if now - heard > self.hang:
            return outcome.HUNG, f"no output and no record for {self.hang:g} s"
        return None


class TrialJob(Protocol):
    """What runs, and writes what it says to a log."""

    settling: float
    """Seconds until what it wrote last is seen here: not at once, where folders are shared over a network."""

    def look(self, seconds: float) -> bool:
        """Wait for at most so long, and take what it says; whether it said anything."""

    def is_waiting(self) -> bool:
        """Whether it has not begun: time in a queue is no time of the trial's."""

    def is_over(self) -> bool:
        """Whether it has ended."""

    def stop(self) -> None:
        """See that it has ended, whatever it does, and take the rest of what it said."""

    def failure(self) -> tuple[str, str] | None:
        """Outcome and reason of one that ended by itself and not well."""


def run(
    job: TrialJob,
    log: TrialLog,
    folder: Path,
    limits: TrialLimits,
    is_behind: Callable[[], str | None] = lambda: None,
    beat: Callable[[], None] = lambda: None,
) -> TrialEnd:
    """Watch a job to its end, or end it, and say how it ended. An interruption ends it too, and goes on."""
    metrics = Metrics(folder / RUN / METRICS, log.measured)
    clock = Clock()
    try:
        verdict = _watch(job, metrics, limits, clock, is_behind, beat)
        if verdict is None:
            _settle(job, metrics, log.measured)
    finally:
        job.stop()  # An interruption comes through here as well.
        metrics.look()
        log.close()
    verdict = verdict or job.failure()
    missing = next((why for each in log.measured if (why := each.missing()) is not None), None)
    if verdict is None and missing is not None:
        verdict = outcome.of_silence(missing, log.tail)
    return TrialEnd(*(verdict or (outcome.FINISHED, "")), clock.seconds)


class Clock:
    """When a trial began to run, and when it was last heard of."""

    def __init__(self) -> None:
        self.began = self.heard = self.last = time.monotonic()

    @property
    def seconds(self) -> float:
        """That it has run."""
        return self.last - self.began

    def tick(self, is_waiting: bool, was_heard: bool) -> None:
        """Let time go by."""
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
    """Until the job has ended; or the outcome and reason that it is to be ended with."""
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
    """Wait for the last records of a job elsewhere."""
    deadline = time.monotonic() + job.settling
    metrics.look()
    while any(each.value is None for each in measured) and time.monotonic() < deadline:
        if job.failure() is not None:
            return
        job.look(SECONDS_BETWEEN_LOOKS)
        metrics.look()
