"""What a study remembers of its trials, as Optuna keeps it, and the words we keep beside.

A trial's user attributes: `ended` (outcome, reason, seconds, values and curves of its objectives so far), `predicted`
by the planner, `worker` (host, process, when that began, and since when it works at this trial) with a `beat` that
counts up while it lives, `retries`, and `takes_up`, the number of a lost trial whose job may still run. Moments are in
UTC: Optuna's own are those of each host's clock and place.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steelyard.tune import outcome
from steelyard.tune.search_space import key

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial


TIMED = (*outcome.RAN, outcome.INTERRUPTED, outcome.CUT_SHORT, "running")
"""Trials whose end is known to the second. That of a lost one is when somebody noticed."""


def result_of(trial: FrozenTrial) -> str:
    """How a trial ended; `running` or `waiting` where it has not."""
    if not trial.state.is_finished():
        return trial.state.name.lower()
    return str(reported(trial, "outcome", outcome.LOST))


def reported(trial: FrozenTrial, name: str, otherwise: Any = None) -> Any:
    """What was written down at a trial's end."""
    return trial.user_attrs.get("ended", {}).get(name, otherwise)


def ran(trials: Sequence[FrozenTrial]) -> list[FrozenTrial]:
    """Those that count as trials: run to some end of their own."""
    return [trial for trial in trials if result_of(trial) in outcome.RAN]


def counted(trials: int) -> str:
    """So many trials, in words."""
    return "1 trial" if trials == 1 else f"{trials} trials"


def spent(trials: Sequence[FrozenTrial]) -> int:
    """Trials of the budget that are used up or being used."""
    return sum(result_of(trial) in (*outcome.RAN, "running") for trial in trials)


def settled(trials: Sequence[FrozenTrial]) -> int:
    """Points that something is known about. What the sampler does next follows from their number and the seed alone,
    so that a study that was killed goes on as if nothing had happened."""
    return sum(result_of(trial) in (*outcome.RAN, *outcome.REJECTED) for trial in trials)


def tried(trials: Sequence[FrozenTrial]) -> dict[str, int]:
    """Points that need not be run again, or are being run, with the number of their trial."""
    known = (*outcome.RAN, outcome.PRUNED_BY_PLAN, outcome.BREAKS_CONSTRAINT, "running")
    return {key(trial.params): trial.number for trial in reversed(trials) if result_of(trial) in known}


def seconds_used(trials: Sequence[FrozenTrial], now: datetime) -> float:
    """Time in which at least one trial ran: with pauses left out, and workers side by side counted once."""
    spans = sorted(
        (first, _moment(reported(trial, "at"), trial.datetime_complete) or now)
        for trial in trials
        if result_of(trial) in TIMED
        and (first := _moment(trial.user_attrs.get("worker", {}).get("since"), trial.datetime_start)) is not None
    )
    total, end = 0.0, None
    for first, last in spans:
        begins = first if end is None else max(first, end)
        if last > begins:
            total += (last - begins).total_seconds()
            end = last
    return total


def _moment(written: str | None, naive: datetime | None) -> datetime | None:
    """A moment as we write it; of studies that are older, Optuna's, as if it was taken here."""
    if written is not None:
        return datetime.fromisoformat(written)
    return None if naive is None else naive.astimezone(UTC)


def now() -> datetime:
    """This moment, the same everywhere."""
    return datetime.now(UTC)


def me() -> dict[str, Any]:
    """Who this worker is: enough to tell later whether it still lives."""
    own = {"host": socket.gethostname(), "process": os.getpid(), "began": _began(os.getpid())}
    return own | {"since": now().isoformat()}


def is_dead(worker: dict[str, Any]) -> bool:
    """Whether a worker of this host is gone for certain. Of other hosts nothing is certain."""
    if worker.get("host") != socket.gethostname():
        return False
    return _began(int(worker.get("process", 0))) != worker.get("began")


def _began(process: int) -> str | None:
    """When a process of this number began, in the kernel's ticks; None where there is none.

    Numbers are used again, and a boot begins the count anew: the boot's name is part of it.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}:{Path(f'/proc/{process}/stat').read_text(errors='replace').rpartition(')')[2].split()[19]}"
    except OSError:
        pass
    if Path("/proc/self").exists():
        return None
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    return "alive"
