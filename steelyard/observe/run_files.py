"""Reading small files of a run folder that may be missing, torn or not what they should be."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from steelyard.core.safe_parse import loads

MOST_BYTES = 1 << 16


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; an empty one where there is none."""
    try:
        found = loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def last_lines(path: Path, count: int) -> list[str]:
    """The last lines of a text, however long it is."""
    try:
        with open(path, "rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - MOST_BYTES))
            return file.read().decode("utf-8", errors="replace").splitlines()[-count:]
    except OSError:
        return []


def listed(folder: Path, *suffixes: str) -> list[Path]:
    """The files of a folder whose names end in one of some ways, in order; none where there is no folder."""
    try:
        with os.scandir(folder) as entries:
            return sorted(
                folder / entry.name
                for entry in entries
                if entry.name.endswith(suffixes) and not entry.name.startswith(".")
            )
    except OSError:
        return []
