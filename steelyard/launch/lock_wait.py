"""Waits for the lock of a run folder that a lost node still holds.

The kernel releases `run.lock` when its owner dies. On a network filesystem only the server can do so, when it stops
waiting for the node: after the lease time of NFS (90 s by default), or when Lustre evicts the client. Until then the
ranks of the next attempt would end with "is in use".
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from steelyard.core import files
from steelyard.core.errors import RuntimeFailure
from steelyard.core.run import LOCK

SECONDS_TO_RELEASE = 300.0  # for the lock of a lost node
SECONDS_BETWEEN_TRIES = 1.0


def until_free(run: Path, stop_signals: list[int], tell: Callable[[str], None]) -> bool:
    """Wait until nobody holds the lock; False if a stop signal arrives first. `tell` gets the reason to wait, once."""
    deadline, has_logged = time.monotonic() + SECONDS_TO_RELEASE, False
    while not _is_free(run):
        if stop_signals:
            return False
        if not has_logged:
            tell(f"{run} is in use by {_owner(run)}; tries again for {SECONDS_TO_RELEASE:.0f} s, since a file server "
                 "releases the lock of a lost node late")  # fmt: skip
            has_logged = True
        if time.monotonic() > deadline:
            raise RuntimeFailure(
                f"{run} is still in use by {_owner(run)} after {SECONDS_TO_RELEASE:.0f} s",
                hint="end that process; if its node is down, submit again when the file server has released its locks",
            )
        time.sleep(SECONDS_BETWEEN_TRIES)
    return True


def _is_free(run: Path) -> bool:
    try:
        with files.locked(run / LOCK):
            return True
    except BlockingIOError:
        return False
    except OSError:  # No locks here, or no space: rank 0 reports it if it matters.
        return True


def _owner(run: Path) -> str:
    try:
        return (run / LOCK).read_text(encoding="utf-8", errors="replace").strip() or "another process"
    except OSError:
        return "another process"
