"""Heartbeats of the nodes of a run: `launch/alive/<host>`, an empty file that the node agent touches every two seconds.

The agent removes its file when it ends. A file that stays and is no longer touched belongs to a node that lost its
power or its network, or whose agent was killed. Times are those of the filesystem, so that clocks of hosts need not
agree.
"""

from __future__ import annotations

import os
import socket
import threading
from contextlib import suppress
from pathlib import Path

from steelyard.launch.launch_record import FOLDER

ALIVE = "alive"
SECONDS_BETWEEN_BEATS = 2.0


class Heartbeat:
    """A thread that touches the file of this host, or another one in `launch/`, until the block ends."""

    def __init__(self, run: Path, host: str | None = None, file: str | None = None) -> None:
        self.path = run / FOLDER / (file or f"{ALIVE}/{host or socket.gethostname()}")
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True, name="heartbeat")

    def __enter__(self) -> Heartbeat:
        with suppress(OSError):  # A full disk; the node is then judged by its samples.
            self.path.parent.mkdir(parents=True, exist_ok=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(timeout=5)  # A filesystem that hangs must not block the end of the run.
        with suppress(OSError):
            self.path.unlink(missing_ok=True)

    def _beat(self) -> None:
        while True:
            with suppress(OSError):
                self.path.touch()
            if self._over.wait(SECONDS_BETWEEN_BEATS):
                return


def beats(run: Path) -> dict[str, float]:
    """When each node was last alive, by the filesystem's clock."""
    found = {}
    with suppress(OSError):
        for path in sorted((run / FOLDER / ALIVE).iterdir()):
            with suppress(OSError), open(path, "rb") as file:  # Opening refreshes the cache of NFS.
                found[path.name] = os.fstat(file.fileno()).st_mtime
    return found
