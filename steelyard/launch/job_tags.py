"""Jobs that nobody wrote down, found again by a mark.

Between sbatch's answer and `launch.json` whoever submits may be killed. So the intent is written first: `launch.json`
without numbers, but with marks, one for each job to come. A mark is the word behind the script on sbatch's line, which
changes nothing and which squeue shows as part of the job's command; and a job that has begun leaves its number in
`launch/began-MARK`, for when squeue has forgotten it. Whoever asks next fills in the numbers.

    2f31c0a9d4b8-1      the first launch of a run folder
    2f31c0a9d4b8-2.0    the second: its master, and behind .1 and so on its followers
    2f31c0a9d4b8-1_4    the fourth task of an array, which has the mark of its first run
"""

from __future__ import annotations

import hashlib
import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from steelyard.core import files
from steelyard.core.errors import UserError
from steelyard.launch import launch_record, slurm_cli
from steelyard.launch.launch_record import FOLDER, JOB, JOBS, Launch

BEGAN = "began-"
WIDTHS = {"jobarrayid": 40, "command": 8192}
ASKING = [
    "squeue", "--noheader", "--array", "--states=all", "--me",
    "--Format=" + ",".join(f"{name}:{width}" for name, width in WIDTHS.items()),
]  # fmt: skip
# For the shell to fill in: what the job is called in squeue and sacct.
NUMBER = '"${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_}${SLURM_ARRAY_TASK_ID:-$SLURM_JOB_ID}"'


def next_mark(run: Path) -> str:
    """The mark of the coming launch of a folder: alike in a dry run and in what follows it, and never used before."""
    try:
        launch = launch_record.read(run)
    except UserError:  # Told by whoever needs to know what it says.
        launch = None
    before = [re.search(r"-(\d+)", mark) for mark in launch.marks] if launch is not None else []
    number = max((int(found[1]) for found in before if found), default=0) + 1
    digest = hashlib.sha256(str(run.resolve()).encode(errors="surrogateescape")).hexdigest()
    return f"{digest[:12]}-{number}"


def launched(run: Path) -> Launch | None:
    """How a run was launched, with the numbers of its jobs though nobody wrote them down; None: nobody launched it.

    Where Slurm has only some of the jobs yet, or will never have more, those are named and nothing is written.
    """
    launch = launch_record.read(run)
    if launch is None or launch.jobs or not launch.marks:
        return launch
    queue = marked(slurm_cli.answer(ASKING))
    found = [_began(run, mark) or _in_queue(queue, mark) for mark in launch.marks]
    launch = replace(launch, jobs=[job for job in found if job is not None])
    if None not in found:
        with suppress(OSError):  # Somebody who may only read has his answer all the same.
            write_jobs(run, launch.jobs)
            launch_record.write(run, launch)
    return launch


def write_jobs(run: Path, jobs: list[str]) -> None:
    """The numbers of a master and its followers, for their scripts."""
    files.write_text(run / FOLDER / JOBS, "".join(f"{job}\n" for job in jobs))


def marked(text: str) -> dict[str, str]:
    """The newest job for each last word of a command, from squeue's columns; parts and tasks are their job."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        job = re.split(r"[_+]", line[: WIDTHS["jobarrayid"]].strip())[0]
        words = line[WIDTHS["jobarrayid"] :].split()
        if words and JOB.fullmatch(job) and int(job) > int(found.get(words[-1], "0")):
            found[words[-1]] = job
    return found


def _in_queue(queue: dict[str, str], mark: str) -> str | None:
    word, _, task = mark.partition("_")
    job = queue.get(word)
    return f"{job}_{task}" if job and task else job


def _began(run: Path, mark: str) -> str | None:
    try:
        number = (run / FOLDER / f"{BEGAN}{mark}").read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return None
    return number if JOB.fullmatch(number) else None
