"""Where a run has memory checkpoints, in its manifest, so that what a failed run leaves on its nodes can be named:

    "memory_checkpoints": {"folder": "/dev/shm/steelyard-0123456789abcdef", "hosts": ["a1", "b1"]}

A host leaves the list when its folder is removed. A lost host stays in it, unless a later attempt runs there.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from steelyard.core.run import Run

KEY = "memory_checkpoints"


def read(run: Run) -> tuple[Path, list[str]] | None:
    """The folder and the hosts; None if the run has no memory checkpoints."""
    found = run.manifest().get(KEY)
    if not isinstance(found, dict) or not isinstance(found.get("folder"), str):
        return None
    return Path(found["folder"]), [str(host) for host in found.get("hosts") or ()]


def add(run: Run, folder: Path, hosts: Sequence[str]) -> None:
    """Record that these hosts may have memory checkpoints in the folder."""
    before = read(run)
    others = before[1] if before is not None and before[0] == folder else []
    run.update(**{KEY: {"folder": str(folder), "hosts": sorted({*others, *hosts})}})


def discard(run: Run, hosts: Sequence[str]) -> None:
    """Record that these hosts have none any more."""
    before = read(run)
    if before is not None:
        left = [host for host in before[1] if host not in hosts]
        run.update(**{KEY: {"folder": str(before[0]), "hosts": left} if left else None})
