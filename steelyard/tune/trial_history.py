"""Queries over the trials of a study, as Optuna stores them with our user attributes.

A trial's user attributes: `ended` (outcome, reason, seconds, values and curves of its objectives so far), `predicted`
by the planner, `worker` (host, process, its start time, and since when it runs this trial), a heartbeat counter `beat`,
`retries`, and `takes_up`, the number of a lost trial whose job may still run. Times are in UTC, since Optuna's own
are in each host's local time.
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
"""Trials whose end time is known. For a lost trial only the time of its detection is known."""


def result_of(trial: FrozenTrial) -> str:
    """The outcome of a trial; `running` or `waiting` if it has not ended."""
    if not trial.state.is_finished():
        return trial.state.name.lower()
    return str(reported(trial, "outcome", outcome.LOST))


def reported(trial: FrozenTrial, name: str, otherwise: Any = None) -> Any:
    """A field that was recorded at a trial's end."""
    return trial.user_attrs.get("ended", {}).get(name, otherwise)


def ran(trials: Sequence[FrozenTrial]) -> list[FrozenTrial]:
    """The trials that count against the budget."""
    return [trial for trial in trials if result_of(trial) in outcome.RAN]


def counted(trials: int) -> str:
    """The number of trials as text."""
    return "1 trial" if trials == 1 else f"{trials} trials"


def spent(trials: Sequence[FrozenTrial]) -> int:
    """Trials of the budget that have ended or are running."""
    return sum(result_of(trial) in (*outcome.RAN, "running") for trial in trials)


def settled(trials: Sequence[FrozenTrial]) -> int:
    """Number of points with a known outcome. The sampler's next point depends only on this number and the seed, so a
    killed study continues with the same points."""
    return sum(result_of(trial) in (*outcome.RAN, *outcome.REJECTED) for trial in trials)


def tried(trials: Sequence[FrozenTrial]) -> dict[str, int]:
    """Points that need not be run again or are running, with the number of their trial."""
    known = (*outcome.RAN, outcome.PRUNED_BY_PLAN, outcome.BREAKS_CONSTRAINT, "running")
    return {key(trial.params): trial.number for trial in reversed(trials) if result_of(trial) in known}


def seconds_used(trials: Sequence[FrozenTrial], now: datetime) -> float:
    """Seconds in which at least one trial ran: without pauses, and with parallel workers counted once."""
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
    """A time that we stored; in older studies Optuna's time, interpreted in the local time zone."""
    if written is not None:
        return datetime.fromisoformat(written)
    return None if naive is None else naive.astimezone(UTC)


def now() -> datetime:
    """The current time in UTC."""
    return datetime.now(UTC)


def me() -> dict[str, Any]:
    """The identity of this worker, to check later whether it is alive."""
    own = {"host": socket.gethostname(), "process": os.getpid(), "began": _began(os.getpid())}
    return own | {"since": now().isoformat()}


def is_dead(worker: dict[str, Any]) -> bool:
    """Whether a worker of this host is certainly dead. For other hosts this is unknown."""
    if worker.get("host") != socket.gethostname():
        return False
    return _began(int(worker.get("process", 0))) != worker.get("began")


def _began(process: int) -> str | None:
    """Start time of a process, in kernel ticks, with the boot id; None if there is no such process.

    Process ids are reused, and ticks restart at a boot, so the boot id is included.
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
