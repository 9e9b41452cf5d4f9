"""Ending a job that was submitted."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from steelyard.core.errors import RuntimeFailure, UserError
from steelyard.launch import launch_record, scheduler, slurm, slurm_cli, supervisor
from steelyard.launch.job_tags import launched
from steelyard.launch.launch_record import Launch

SECONDS_TO_SAVE = 30.0
SECONDS_TO_FIND = 5.0


def cancel_run(run: Path, at_once: bool = False) -> dict[str, Any]:
    """Have a job end: its ranks save and stop, or, `at_once`, are killed."""
    launch = launched(run)
    if launch is None:
        raise UserError(
            f"{run} was not submitted: it has no {launch_record.LAUNCH}", hint="end the process that trains it"
        )
    if not launch.jobs:
        raise UserError(
            f"Slurm has no job of {run}: whoever submitted it was ended before, or is still at it",
            hint="submit it again, or look again in a minute",
        )
    state = scheduler.state(scheduler.refresh(run), launch.jobs)
    if state is not None and state not in scheduler.LIVE:
        return {"run": str(run), "jobs": launch.jobs, "state": state, "cancelled": False}
    if launch.process is not None:
        # mpirun kills its ranks a second after a SIGTERM, and hands a SIGUSR1 on.
        politely = signal.SIGUSR1 if launch.backend == "mpi" else signal.SIGTERM
        _stop(run, launch.process, signal.SIGKILL if at_once else politely)
        if at_once and launch.backend == "slurm":
            _kill_step(launch)
    else:
        scancel(launch.jobs, at_once)
    state = scheduler.state(scheduler.refresh(run), launch.jobs)
    return {"run": str(run), "jobs": launch.jobs, "state": state, "cancelled": True}


def _stop(run: Path, who: dict[str, Any], number: int) -> None:
    if supervisor.is_alive(who) is None:
        raise UserError(f"its supervisor runs on {who.get('host')}", hint="cancel it there")
    supervisor.stop(who, number)
    deadline = time.monotonic() + SECONDS_TO_SAVE
    while supervisor.is_alive(who) and time.monotonic() < deadline:
        time.sleep(0.1)
    if not supervisor.is_alive(who) and supervisor.ended(run) is None:  # It had no time to say so itself.
        supervisor.note_end(run, "CANCELLED", 128 + number, None)


def _kill_step(launch: Launch) -> None:
    """End what a supervisor that was killed had srun start in an allocation. The allocation is not ours to end.

    Its srun may still be about to start it, so it is looked for more than once.
    """
    job, name = launch.jobs[0], slurm.step_name(launch.name, launch.submitted)
    ask = ["squeue", "--noheader", "--steps", f"--jobs={job}", "--format=%i %j"]
    deadline = time.monotonic() + SECONDS_TO_FIND
    was_found = False
    while time.monotonic() < deadline:
        pairs = [line.split(maxsplit=1) for line in slurm_cli.answer(ask).splitlines()]
        steps = [pair[0] for pair in pairs if pair[1:] == [name] and launch_record.STEP.fullmatch(pair[0])]
        if steps:
            was_found = True
            scancel(steps, at_once=True)
        elif was_found:
            return
        time.sleep(0.5)


def scancel(jobs: list[str], at_once: bool = False) -> None:
    """scancel warns with SIGTERM and kills after the cluster's KillWait; its SIGKILL leaves no time to save."""
    now = ["--signal=KILL", *([] if any("." in job for job in jobs) else ["--full"])]  # A step has no script to kill.
    words = ["scancel", *(now if at_once else []), *jobs]
    try:
        answer = subprocess.run(words, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        raise RuntimeFailure(f"scancel failed: {error}") from None
    if answer.returncode:
        raise RuntimeFailure(f"scancel failed: {answer.stderr.strip()}")
