"""The end of a file that may be huge, such as a log."""

from __future__ import annotations

import os
from pathlib import Path

LOOK_BACK = 1 << 18  # bytes in which the last lines are


def end_of(path: Path, most: int, size: int | None = None) -> tuple[bytes, int]:
    """At most `most` bytes from the end of a file, or of its first `size` bytes, and the offset at which they end."""
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END) if size is None else size
        file.seek(max(0, size - most))
        return file.read(size - file.tell()), size


def last_lines(path: Path, count: int, size: int | None = None) -> list[str]:
    """The last complete lines of a text file, or of its first `size` bytes; none if it cannot be read."""
    try:
        data, size = end_of(path, LOOK_BACK, size)
    except OSError:
        return []
    lines = data.decode("utf-8", errors="replace").splitlines()
    if size > len(data) and len(lines) > 1:
        lines = lines[1:]  # The first line is incomplete.
    return lines[-count:] if count else []
