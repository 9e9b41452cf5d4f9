"""Captures the output of ranks into `logs/<host>.out` and `logs/<host>.err`.

Output goes through the node agent instead of directly to the files: lines of several ranks are not mixed, secrets are
removed, and a full disk loses log lines but never a rank. The last lines are kept for the report of a failed rank.
"""

from __future__ import annotations

import threading
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import IO

from steelyard.core import secrets

LINES_KEPT = 20
LONGEST_LINE = 1 << 16


class LogFile:
    """A file that several ranks write to, line by line."""

    def __init__(self, path: Path) -> None:
        self.path, self.lost = path, 0
        self._lock = threading.Lock()
        with suppress(OSError):
            path.touch()  # An empty log means that there was no output.

    def add(self, line: str) -> None:
        """Append a line. If the disk is full, count it as lost."""
        with self._lock:
            try:
                with open(self.path, "a", encoding="utf-8") as file:
                    if self.lost:
                        file.write(f"warning: {self.lost} lines could not be written here: the disk was full\n")
                        self.lost = 0
                    file.write(line + "\n")
            except OSError:
                self.lost += 1


class PipeReader:
    """A thread that copies one rank's output to a log."""

    def __init__(self, source: IO[bytes], log: LogFile) -> None:
        self.last: deque[str] = deque(maxlen=LINES_KEPT)
        self._source, self._log = source, log
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        with self._source:
            while raw := self._source.readline(LONGEST_LINE):
                line = secrets.scrub(raw.decode("utf-8", errors="replace").rstrip("\r\n"))
                self.last.append(line)
                self._log.add(line)

    def finish(self, seconds: float = 5.0) -> None:
        """Wait until all output is written, with a timeout: a process that a rank left may hold the pipe open."""
        self._thread.join(seconds)
