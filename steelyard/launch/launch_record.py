"""Records of a job in its run folder: `launch.json`, how it was submitted, and `scheduler.jsonl`, its states.

`launch.json` has these keys:

    backend     the value of `--on`
    name        the name of the job
    jobs        its ids, as the backend gives them: one, or several if several jobs make up the run
    command     the command of every rank, without secrets
    nodes       the number of nodes, or null if the backend decides
    ranks, gpus_per_node, partitions, placement, site, workdir, submitted
    process     {"pid", "started", "host"} of the supervisor, for a job that runs under one (`supervisor.py`)
    marks       one tag per job: the backend uses them to find jobs whose ids were not recorded

The submitting process may be killed after the scheduler accepts a job and before `launch.json` is written. So the file
is written before, without ids and with marks, and the next reader fills in the ids.

`scheduler.jsonl` has one object for each change. `state` is a `JobState`. Older files have Slurm's states, which are
translated when they are read.

    {"time": ISO, "job": "123", "state": "running", "reason": "", "nodes": "a[1-2]", "exit_code": null,
     "elapsed": 12, "time_limit": 3600, "restarts": 0}

A waiting job may have `hint`, `never`, true if it can never start as submitted, and `missing`, the nodes that it needs
and that are not alive: {"partition": "a100", "needed": 2, "alive": 1, "down": ["b2 is down"]}. The scripts of a job are
in the folder `launch/`. There, `jobs` repeats the ids, one per line, for the scripts. `command.json` has a command that
contains a secret; only its owner can read it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from steelyard.core import files
from steelyard.core.errors import UserError
from steelyard.core.run import MANIFEST, Run, now
from steelyard.core.safe_parse import json_objects, loads
from steelyard.launch import backends
from steelyard.launch.backends import ENDED, JobState, Record

LAUNCH, RECORDS, FOLDER, JOBS = "launch.json", "scheduler.jsonl", "launch", "jobs"
# An id is passed to the backend's programs: it must not look like an option or contain shell syntax.
JOB_ID = re.compile(r"[A-Za-z0-9][\w.+:@/\[\]-]*", re.ASCII)


@dataclass(frozen=True)
class Launch:
    """The contents of `launch.json`."""

    backend: str
    name: str
    jobs: list[str]
    command: list[str]
    nodes: int | None
    ranks: int
    gpus_per_node: int | None = None
    partitions: list[str] = field(default_factory=list)
    submitted: str = ""
    site: str | None = None
    placement: list[str] = field(default_factory=list)
    workdir: str = ""
    process: dict[str, Any] | None = None
    marks: list[str] = field(default_factory=list)

    def owns(self, named: str) -> bool:
        """Whether a job id belongs to one of the launch's jobs, or to a part of one."""
        return any(backends.owns(self.backend, job, named) for job in self.jobs)


def write(run: Path, launch: Launch) -> None:
    """Write `launch.json`, replacing an earlier launch of the same run."""
    files.write_json(run / LAUNCH, asdict(launch))


def read(run: Path) -> Launch | None:
    """The launch as recorded; None if the run was not submitted."""
    try:
        values = loads((run / LAUNCH).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UserError(f"{run / LAUNCH} cannot be read: {error}") from None
    try:
        launch = Launch(**{key: value for key, value in values.items() if key in Launch.__dataclass_fields__})
        if not all(JOB_ID.fullmatch(job) for job in launch.jobs):
            raise TypeError(f"invalid job ids: {launch.jobs}")
        return launch
    except (TypeError, AttributeError) as error:
        raise UserError(f"{run / LAUNCH} is not a valid launch record: {error}") from None


def launched(run: Path) -> Launch | None:
    """The launch, with job ids from the backend if none were recorded; None if the run was not submitted.

    If the backend knows only some of the jobs, now or ever, those are returned and nothing is written.
    """
    launch = read(run)
    if launch is None or launch.jobs or not launch.marks:
        return launch
    found = backends.load(launch.backend).find(run, launch.marks)
    launch = replace(launch, jobs=[job for job in found if job is not None])
    if None not in found:
        with suppress(OSError):  # The folder may be read-only for this user.
            write_jobs(run, launch.jobs)
            write(run, launch)
    return launch


def write_jobs(run: Path, jobs: list[str]) -> None:
    """Write the ids of the jobs of a run, for their scripts."""
    files.write_text(run / FOLDER / JOBS, "".join(f"{job}\n" for job in jobs))


def next_mark(run: Path) -> str:
    """The mark of the next launch of a folder: never used before, and the same in a dry run and the submission."""
    try:
        launch = read(run)
    except UserError:  # A reader that needs the file reports the error.
        launch = None
    before = [re.search(r"-(\d+)", mark) for mark in launch.marks] if launch is not None else []
    number = max((int(found[1]) for found in before if found), default=0) + 1
    digest = hashlib.sha256(str(run.resolve()).encode(errors="surrogateescape")).hexdigest()
    return f"{digest[:12]}-{number}"


@contextmanager
def intended(launches: dict[Path, Launch]) -> Iterator[None]:
    """Record what is about to be submitted, in case this process is killed. A refusal restores the previous record.

    After any other error, such as a scheduler timeout, there may be a job, so the marks stay.
    """
    before = {run: read(run) for run in launches}
    for run, launch in launches.items():
        write(run, launch)
    try:
        yield
    except UserError:
        for run, launch_before in before.items():
            if launch_before is None:
                (run / LAUNCH).unlink(missing_ok=True)
            else:
                write(run, launch_before)
        raise


def refresh(run: Path) -> list[Record]:
    """Poll the backend, append changed records, and return all records. A backend that does not answer changes nothing.

    For a user who can only read the folder, changes are returned but not written.
    """
    launch = launched(run)
    records = read_records(run)
    if launch is None:
        return records
    last = {each["job"]: each for each in records}
    polled_at = now()  # A poll can take seconds on a busy machine, so elapsed times refer to its start, not its end.
    found = backends.load(launch.backend).poll(run, launch, last)
    changed = [each for each in found if _differs(last.get(each["job"]), each)]
    if changed:
        stamped = [each | {"time": polled_at} for each in changed]
        with suppress(OSError), open(run / RECORDS, "a", encoding="utf-8") as file:
            file.write("".join(json.dumps(each) + "\n" for each in stamped))
        records += stamped
    return records


def read_records(run: Path) -> list[Record]:
    """All records so far, without incomplete lines."""
    try:
        lines = (run / RECORDS).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    return [backends.neutral(each) for each in json_objects(lines) if {"job", "state"} <= each.keys()]


def current(records: list[Record], launch: Launch) -> list[Record]:
    """The newest record of each job of a launch, and of each part that is polled separately."""
    return list({each["job"]: each for each in records if launch.owns(str(each["job"]))}.values())


def state(records: list[Record], launch: Launch) -> JobState | None:
    """One state for all jobs of a launch: the first failed one, else the first live one, else finished."""
    states = [JobState(each["state"]) for each in current(records, launch)]
    bad = [each for each in states if each in ENDED - {JobState.FINISHED}]
    live = [each for each in states if each not in ENDED]
    return next(iter([*bad, *live, *states]), None)


def is_over(run: Path) -> bool:
    """Whether the run is over: its launch ended, or it was never launched and no process writes to it."""
    launch = launched(run)
    if launch is None:
        return not (run / MANIFEST).is_file() or Run(run).state not in ("running", "created")
    return state(refresh(run), launch) in ENDED


def _differs(before: Record | None, after: Record) -> bool:
    """Whether anything except the elapsed time changed."""
    steady = ("state", "reason", "nodes", "exit_code", "time_limit", "restarts", "missing")
    return before is None or any(before.get(key) != after.get(key) for key in steady)
