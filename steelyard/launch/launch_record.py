"""What a run folder says of its job: `launch.json`, how it was submitted, and `scheduler.jsonl`, its states.

`launch.json` has these keys:

    backend     as `--on` names it
    name        what the job is called
    jobs        its ids, as the backend gives them: one, or one for each of several jobs that make up a run
    command     the command of every rank, without secrets
    nodes       how many, or null where the backend decides
    ranks, gpus_per_node, partitions, placement, site, workdir, submitted
    process     {"pid", "started", "host"} of the supervisor, for a job that runs under one (`supervisor.py`)
    marks       one for each job: the backend finds jobs by them whose ids nobody could write down

Whoever submits may be killed between the scheduler's answer and `launch.json`. So the file is written before, without
ids and with marks, and whoever reads it next fills in the ids.

`scheduler.jsonl` has one object for each change. `state` is a `JobState`; files written before have Slurm's states,
which are translated when they are read.

    {"time": ISO, "job": "123", "state": "running", "reason": "", "nodes": "a[1-2]", "exit_code": null,
     "elapsed": 12, "time_limit": 3600, "restarts": 0}

A job that waits may have `hint`, what helps, and `never`, true where it cannot start as it is. The scripts of a job lie
in the folder `launch/` beside these files. There `jobs` has the ids once more, one on each line, for the scripts to
read. A command with a secret in it is in `command.json` there, which only its owner can read.
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
from steelyard.core.safe_parse import loads
from steelyard.launch import backends
from steelyard.launch.backends import ENDED, JobState, Record

LAUNCH, RECORDS, FOLDER, JOBS = "launch.json", "scheduler.jsonl", "launch", "jobs"
# An id is an argument of the backend's programs: none may be an option, or mean something to a shell.
JOB_ID = re.compile(r"[A-Za-z0-9][\w.+:@/\[\]-]*", re.ASCII)


@dataclass(frozen=True)
class Launch:
    """What `launch.json` says."""

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
        """Whether a job id is that of one of its jobs, or of a part of one."""
        return any(backends.owns(self.backend, job, named) for job in self.jobs)


def write(run: Path, launch: Launch) -> None:
    """Write `launch.json`; an earlier launch of the same run is replaced."""
    files.write_json(run / LAUNCH, asdict(launch))


def read(run: Path) -> Launch | None:
    """How a run was launched, as it was written down; None where nobody submitted it."""
    try:
        values = loads((run / LAUNCH).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UserError(f"{run / LAUNCH} cannot be read: {error}") from None
    try:
        launch = Launch(**{key: value for key, value in values.items() if key in Launch.__dataclass_fields__})
        if not all(JOB_ID.fullmatch(job) for job in launch.jobs):
            raise TypeError(f"no job ids: {launch.jobs}")
        return launch
    except (TypeError, AttributeError) as error:
        raise UserError(f"{run / LAUNCH} is not what a launch writes: {error}") from None


def launched(run: Path) -> Launch | None:
    """How a run was launched, with the ids of its jobs though nobody wrote them down; None: nobody launched it.

    Where the backend knows only some of the jobs yet, or will never know more, those are named and nothing is written.
    """
    launch = read(run)
    if launch is None or launch.jobs or not launch.marks:
        return launch
    found = backends.load(launch.backend).find(run, launch.marks)
    launch = replace(launch, jobs=[job for job in found if job is not None])
    if None not in found:
        with suppress(OSError):  # Somebody who may only read is answered all the same.
            write_jobs(run, launch.jobs)
            write(run, launch)
    return launch


def write_jobs(run: Path, jobs: list[str]) -> None:
    """Write the ids of several jobs of one run, for their scripts."""
    files.write_text(run / FOLDER / JOBS, "".join(f"{job}\n" for job in jobs))


def next_mark(run: Path) -> str:
    """The mark of the next launch of a folder: the same in a dry run and in what follows it, and never used before."""
    try:
        launch = read(run)
    except UserError:  # Whoever needs the file reports it.
        launch = None
    before = [re.search(r"-(\d+)", mark) for mark in launch.marks] if launch is not None else []
    number = max((int(found[1]) for found in before if found), default=0) + 1
    digest = hashlib.sha256(str(run.resolve()).encode(errors="surrogateescape")).hexdigest()
    return f"{digest[:12]}-{number}"


@contextmanager
def intended(launches: dict[Path, Launch]) -> Iterator[None]:
    """Write down what is about to be submitted, for whoever comes after a kill; a refusal restores what was there.

    After any other end, a scheduler that does not answer in time, say, there may be a job, and the marks stay.
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
    """Poll the backend, append what has changed, and return all records. A backend that is silent changes nothing.

    Whoever may only read the folder is answered all the same; somebody who may write notes the change then.
    """
    launch = launched(run)
    records = read_records(run)
    if launch is None:
        return records
    last = {each["job"]: each for each in records}
    asked = now()  # On a busy machine an answer takes seconds, and what it says of elapsed time is older than its end.
    found = backends.load(launch.backend).poll(run, launch, last)
    changed = [each for each in found if _differs(last.get(each["job"]), each)]
    if changed:
        stamped = [each | {"time": asked} for each in changed]
        with suppress(OSError), open(run / RECORDS, "a", encoding="utf-8") as file:
            file.write("".join(json.dumps(each) + "\n" for each in stamped))
        records += stamped
    return records


def read_records(run: Path) -> list[Record]:
    """All records so far; a torn line is none."""
    try:
        lines = (run / RECORDS).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        try:
            each = loads(line)
        except ValueError:
            continue
        if isinstance(each, dict) and {"job", "state"} <= each.keys():
            found.append(backends.neutral(each))
    return found


def current(records: list[Record], launch: Launch) -> list[Record]:
    """The newest record of each of a launch's jobs, and of each part of one that is polled by itself."""
    return list({each["job"]: each for each in records if launch.owns(str(each["job"]))}.values())


def state(records: list[Record], launch: Launch) -> JobState | None:
    """One state for all jobs of a launch: the first bad end, else what still goes on, else finished."""
    states = [JobState(each["state"]) for each in current(records, launch)]
    bad = [each for each in states if each in ENDED - {JobState.FINISHED}]
    live = [each for each in states if each not in ENDED]
    return next(iter([*bad, *live, *states]), None)


def is_over(run: Path) -> bool:
    """Whether nothing more will come: the launch ended, or nobody launched the run and nobody writes to it."""
    launch = launched(run)
    if launch is None:
        return not (run / MANIFEST).is_file() or Run(run).state not in ("running", "created")
    return state(refresh(run), launch) in ENDED


def _differs(before: Record | None, after: Record) -> bool:
    """Whether anything changed but the time that goes by."""
    steady = ("state", "reason", "nodes", "exit_code", "time_limit", "restarts")
    return before is None or any(before.get(key) != after.get(key) for key in steady)


def runs(folder: Path) -> Iterator[Path]:
    """The runs under a folder, each with a manifest or a launch, newest last."""
    try:
        found = [path for path in folder.iterdir() if (path / LAUNCH).is_file() or (path / MANIFEST).is_file()]
    except OSError:
        return
    yield from sorted(found, key=_age)


def _age(path: Path) -> tuple[float, str]:
    first = path / LAUNCH
    try:
        return (first if first.is_file() else path / MANIFEST).stat().st_mtime, path.name
    except OSError:
        return 0.0, path.name


def find(word: str | Path, folder: Path = Path("runs")) -> Path:
    """The run that a person means: a folder, the name of one under `runs/`, or the id of its job."""
    for candidate in (Path(word), folder / word):
        if (candidate / LAUNCH).is_file() or (candidate / MANIFEST).is_file():
            return candidate
    matching = [path for path in runs(folder) if (launch := read(path)) and launch.owns(str(word))]
    if matching:
        return matching[-1]
    raise UserError(
        f"{word} is no run: it is no folder of one, and no run under {folder} has the job {word}",
        hint="steelyard list shows them",
    )
