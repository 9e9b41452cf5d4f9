"""The checkpoint folders of a run: `step-<8 digits>`, and `damaged/`, which is never deleted.

A folder that cannot be listed is an input/output error, not a run without checkpoints.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

from steelyard.checkpoint import state_file
from steelyard.core import files
from steelyard.core.console import console
from steelyard.core.errors import RuntimeFailure, SteelyardError

VALID_LOSS = "valid_loss"  # a key in the state of a checkpoint that was the best when it was saved
PREFIX = "step-"
DAMAGED = "damaged"


class AllDamagedError(RuntimeFailure):
    """A run has checkpoints on disk, and none of them is intact."""


def path_at(folder: Path, step: int) -> Path:
    """The checkpoint of a step."""
    return folder / f"{PREFIX}{step:08d}"


def by_age(folder: Path) -> list[Path]:
    """All checkpoints in a folder, oldest first."""
    names = state_file.retried(folder, lambda: _names(folder))
    return sorted(folder / name for name in names if re.fullmatch(rf"{PREFIX}\d+(\.\d+)?", name))


def best(folder: Path) -> Path | None:
    """The checkpoint with the lowest validation loss, among those with a readable state that has one."""
    losses = {path: state[VALID_LOSS] for path, state in _states(folder).items() if VALID_LOSS in state}
    return min(losses, key=losses.__getitem__, default=None)


def removable(folder: Path, newest: Path, keep_last: int) -> list[Path]:
    """The checkpoints that retention deletes: all except the newest `keep_last`, the best, and unreadable ones.

    An unreadable checkpoint may be the best, and may become readable again.
    """
    readable = _states(folder)
    kept = {newest, best(folder), *by_age(folder)[-keep_last:]}
    return [path for path in readable if path not in kept]


def _states(folder: Path) -> dict[Path, dict[str, Any]]:
    """The readable states, oldest first."""
    states = {}
    for path in by_age(folder):
        with contextlib.suppress(SteelyardError):
            states[path] = state_file.read(path)[0]
    return states


def move_aside(path: Path) -> None:
    """Move a damaged checkpoint to `damaged/`, which resuming and retention ignore."""
    folder = path.parent / DAMAGED
    folder.mkdir(exist_ok=True)
    target, number = folder / path.name, 1
    while target.exists():
        number += 1
        target = folder / f"{path.name}.{number}"
    path.rename(target)
    for changed in (folder, path.parent):
        files.sync_folder(changed)
    console.warn(f"moved {path.name} to {target}")


def _names(folder: Path) -> list[str]:
    try:
        return [path.name for path in folder.iterdir()]
    except FileNotFoundError:
        return []
