"""Lists the files of a run folder, which may be missing."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path


def listed(folder: Path, *suffixes: str) -> list[Path]:
    """The files of a folder with one of these suffixes, sorted; empty if there is no folder."""
    try:
        with os.scandir(folder) as entries:
            return sorted(
                folder / entry.name
                for entry in entries
                if entry.name.endswith(suffixes) and not entry.name.startswith(".")
            )
    except OSError:
        return []


def size_of(paths: Iterable[Path]) -> int:
    """Bytes of all files; one that is gone has none."""
    total = 0
    for path in paths:
        with contextlib.suppress(OSError):
            total += path.stat().st_size
    return total
