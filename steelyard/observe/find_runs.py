"""Finding runs: by their folder, by a job's number, or all of them below a folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from steelyard.core.errors import UserError
from steelyard.core.run import MANIFEST
from steelyard.core.safe_parse import loads
from steelyard.launch import backends
from steelyard.observe.run_state import LAUNCH

DEEPEST = 4


def below(folder: Path, deepest: int = DEEPEST) -> Iterator[Path]:
    """All run folders below a folder, which may be one itself. What links lead to elsewhere is left alone."""
    try:
        with os.scandir(folder) as entries:
            found = list(entries)
    except OSError:
        return
    if any(entry.name in (MANIFEST, LAUNCH) for entry in found):
        yield folder
        return
    if deepest > 0:
        for entry in sorted(found, key=lambda each: each.name):
            if entry.is_dir(follow_symlinks=False) and not entry.name.startswith("."):
                yield from below(folder / entry.name, deepest - 1)


def find(named: str | None, folder: Path) -> Path:
    """The run that is meant: a folder, a job of one below `folder`, or, where nothing is named, the newest of those."""
    if named is None:
        runs = list(below(folder))
        if not runs:
            raise UserError(f"there is no run below {folder}", hint="name a run folder, or a job")
        return max(runs, key=_touched)
    path = Path(named)
    if any((path / name).is_file() for name in (MANIFEST, LAUNCH)):
        return path
    if any((folder / named / name).is_file() for name in (MANIFEST, LAUNCH)):
        return folder / named
    if path.exists():
        raise UserError(f"{path} is not a run folder: it has neither {MANIFEST} nor {LAUNCH}")
    return by_job(named, folder)


def by_job(job: str, folder: Path) -> Path:
    """The run that a job belongs to; the id of a job also means its parts, and theirs the job."""
    found = [path for path in below(folder) if _has(path, job)]
    if not found:
        raise UserError(
            f"there is no run folder {job}, and no run below {folder} belongs to job {job}",
            hint="name the run folder, or the folder above it with --folder",
        )
    return max(found, key=_touched)


def _has(path: Path, job: str) -> bool:
    try:
        launch = loads((path / LAUNCH).read_bytes())
        name, jobs = launch.get("backend"), [str(each) for each in launch.get("jobs") or []]
    except (OSError, ValueError, AttributeError):
        return False
    return any(backends.owns(name, each, job) or backends.owns(name, job, each) for each in jobs)


def _touched(path: Path) -> float:
    times = [(path / name).stat().st_mtime for name in (MANIFEST, LAUNCH, "metrics.jsonl") if (path / name).is_file()]
    return max(times, default=0.0)
