"""`launch.json`: who was asked to run a run, and under which number. Whoever observes a run starts here.

    backend     "local", "mpi" or "slurm"
    name        what the job is called
    jobs        its numbers as the backend gives them: a Slurm job ("123"), a task of an array ("123_4"), a master and
                its followers ("123", "124"), or the process that supervises the ranks here ("4711")
    command     the words that every rank runs, without secrets
    nodes       how many, or null where the backend decides
    ranks, gpus_per_node, partitions, placement, site, workdir, submitted
    process     local and mpi: {"pid", "started", "host"} of the supervisor, so that no other process is mistaken for it
    marks       by which jobs of Slurm's are found whose numbers nobody could write down (`marks.py`)

The scripts that were started, and how a supervisor ended (`ended.json`), lie in the folder `launch/` beside it. There
`jobs` has the numbers of a master and its followers once more, one on each line, for their scripts to read. A command
with a secret in it is in `command.json` there, which only its owner can read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from steelyard.core import files
from steelyard.core.errors import UserError
from steelyard.core.run import MANIFEST
from steelyard.core.safe_parse import loads

LAUNCH, FOLDER, ENDED, JOBS = "launch.json", "launch", "ended.json", "jobs"
JOB = re.compile(r"\d+(_\d+|\+\d+)?")
STEP = re.compile(JOB.pattern + r"\.\d+(\+\d+)?")


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


def write(run: Path, launch: Launch) -> None:
    """Write it down; an earlier launch of the same run is replaced."""
    files.write_json(run / LAUNCH, asdict(launch))


def read(run: Path) -> Launch | None:
    """How a run was launched; None where nobody submitted it."""
    try:
        values = loads((run / LAUNCH).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UserError(f"{run / LAUNCH} cannot be read: {error}") from None
    try:
        launch = Launch(**{key: value for key, value in values.items() if key in Launch.__dataclass_fields__})
        if not all(JOB.fullmatch(job) for job in launch.jobs):  # They become words of scancel's line.
            raise TypeError(f"no numbers of jobs: {launch.jobs}")
        return launch
    except (TypeError, AttributeError) as error:
        raise UserError(f"{run / LAUNCH} is not what a launch writes: {error}") from None


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
    """The run that a person means: a folder, the name of one under `runs/`, or the number of its job."""
    for candidate in (Path(word), folder / word):
        if (candidate / LAUNCH).is_file() or (candidate / MANIFEST).is_file():
            return candidate
    if JOB.fullmatch(str(word)):
        matching = [path for path in runs(folder) if (launch := read(path)) and _has(launch, str(word))]
        if matching:
            return matching[-1]
        raise UserError(f"no run under {folder} has the job {word}", hint="name the run's folder")
    raise UserError(f"{word} is no run: not a folder of one, nor one under {folder}", hint="steelyard list shows them")


def _has(launch: Launch, job: str) -> bool:
    return job in launch.jobs or job.partition("+")[0] in launch.jobs
