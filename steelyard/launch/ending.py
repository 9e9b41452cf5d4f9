"""Ending a job that was submitted."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from steelyard.core.errors import Fault, UserError
from steelyard.launch import process, record, scheduler

SECONDS_TO_SAVE = 30.0


def cancel(run: Path, at_once: bool = False) -> dict[str, Any]:
    """Have a job end: its ranks save and stop, or, `at_once`, are killed."""
    launch = record.read(run)
    if launch is None:
        raise UserError(f"{run} was not submitted: it has no {record.LAUNCH}", mend="end the process that trains it")
    state = scheduler.state(scheduler.refresh(run), launch.jobs)
    if state is not None and state not in scheduler.LIVE:
        return {"run": str(run), "jobs": launch.jobs, "state": state, "cancelled": False}
    if launch.process is not None:
        _stop(run, launch.process, at_once)
    else:
        scancel(launch.jobs, at_once)
    state = scheduler.state(scheduler.refresh(run), launch.jobs)
    return {"run": str(run), "jobs": launch.jobs, "state": state, "cancelled": True}


def _stop(run: Path, who: dict[str, Any], at_once: bool) -> None:
    if process.is_alive(who) is None:
        raise UserError(f"its supervisor runs on {who.get('host')}", mend="cancel it there")
    number = signal.SIGKILL if at_once else signal.SIGTERM
    process.stop(who, number)
    deadline = time.monotonic() + SECONDS_TO_SAVE
    while process.is_alive(who) and time.monotonic() < deadline:
        time.sleep(0.1)
    if not process.is_alive(who) and process.ended(run) is None:  # It had no time to say so itself.
        process.note_end(run, "CANCELLED", 128 + number, None)


def scancel(jobs: list[str], at_once: bool = False) -> None:
    """scancel warns with SIGTERM and kills after the cluster's KillWait; its SIGKILL leaves no time to save."""
    words = ["scancel", *(["--signal=KILL", "--full"] if at_once else []), *jobs]
    try:
        answer = subprocess.run(words, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        raise Fault(f"scancel failed: {error}") from None
    if answer.returncode:
        raise Fault(f"scancel failed: {answer.stderr.strip()}")
