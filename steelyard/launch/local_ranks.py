"""The ranks of this host that mpirun started, each under a starter of its own, for the sampler of the first one."""

from __future__ import annotations

import os
from pathlib import Path


def ranks() -> list[int]:
    """The children of this process and of those that were started beside it."""
    parents = _parents()
    beside = {pid for pid, parent in parents.items() if parent == os.getppid()}
    return sorted(pid for pid, parent in parents.items() if parent in beside)


def _parents() -> dict[int, int]:
    """Every process and its parent."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            found[int(path.parent.name)] = int(fields[1])
        except (OSError, ValueError, IndexError):  # It has just ended.
            continue
    return found
