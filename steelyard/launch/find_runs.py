"""Finds runs: by folder, by job id, or all below a folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from steelyard.core.errors import UserError
from steelyard.core.run import MANIFEST
from steelyard.core.safe_parse import read_object
from steelyard.launch import backends
from steelyard.launch.launch_record import LAUNCH

DEEPEST = 4


def below(folder: Path, deepest: int = DEEPEST) -> Iterator[Path]:
    """All run folders in or below a folder. Symbolic links are not followed."""
    try:
        with os.scandir(folder) as scan:
            entries = list(scan)
    except OSError:
        return
    if any(entry.name in (MANIFEST, LAUNCH) for entry in entries):
        yield folder
        return
    if deepest > 0:
        for entry in sorted(entries, key=lambda each: each.name):
            if entry.is_dir(follow_symlinks=False) and not entry.name.startswith("."):
                yield from below(folder / entry.name, deepest - 1)


def find(named: str | None, folder: Path = Path("runs")) -> Path:
    """The run named by a folder or by a job id of a run below `folder`; by default the newest run below `folder`."""
    if named is None:
        runs = list(below(folder))
        if not runs:
            raise UserError(f"there is no run below {folder}", hint="pass a run folder or a job id")
        return max(runs, key=_touched)
    path = Path(named)
    if any((path / name).is_file() for name in (MANIFEST, LAUNCH)):
        return path
    if any((folder / named / name).is_file() for name in (MANIFEST, LAUNCH)):
        return folder / named
    runs = [path for path in below(folder) if _has(path, named)]
    if runs:
        return max(runs, key=_touched)
    if path.exists():
        raise UserError(f"{path} is not a run folder: it has neither {MANIFEST} nor {LAUNCH}")
    raise UserError(
        f"{named} is not a run: it is not a run folder, and no run below {folder} has the job {named}",
        hint="steelyard list shows all runs below runs/, and steelyard list DIR those below another folder",
    )


def _has(path: Path, job: str) -> bool:
    """Whether a run has a job; the id of a job matches its parts, and the id of a part its job."""
    launch = read_object(path / LAUNCH)
    name, jobs = launch.get("backend"), [str(each) for each in launch.get("jobs") or []]
    return any(backends.owns(name, each, job) or backends.owns(name, job, each) for each in jobs)


def _touched(path: Path) -> float:
    times = [(path / name).stat().st_mtime for name in (MANIFEST, LAUNCH, "metrics.jsonl") if (path / name).is_file()]
    return max(times, default=0.0)
