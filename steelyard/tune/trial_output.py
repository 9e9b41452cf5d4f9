"""The output of a trial, read while it runs: lines without secrets, and the records of its run."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from steelyard.core import secrets
from steelyard.core.safe_parse import json_objects
from steelyard.tune.objective import ObjectiveValues

LOG = "log.txt"
LONGEST_LINE = 1 << 20
TAIL = 200


class TrialLog:
    """Passes the output of a trial, without secrets, to a log file and to the objectives."""

    def __init__(self, path: Path, measured: Sequence[ObjectiveValues]) -> None:
        self.file: IO[str] = open(path, "w", encoding="utf-8")  # noqa: SIM115 (closed by close)
        self.measured = measured
        self.tail: deque[str] = deque(maxlen=TAIL)
        self._rests: dict[str, bytes] = {}

    def feed(self, data: bytes, source: str = "") -> None:
        """Add data of one source. Only complete lines are processed, so that no secret is split."""
        rest = self._rests.get(source, b"") + data.replace(b"\r", b"\n")
        *whole, rest = rest.split(b"\n")
        if len(rest) > LONGEST_LINE:
            whole, rest = [*whole, rest], b""
        self._rests[source] = rest
        for line in whole:
            self._line(line)
        if whole:
            self.file.flush()

    def _line(self, line: bytes) -> None:
        text = secrets.scrub(line.decode("utf-8", errors="replace"))
        self.file.write(text + "\n")
        self.tail.append(text)
        for each in self.measured:
            each.line(text)

    def close(self) -> None:
        """Process the remaining data, and close the file."""
        for rest in self._rests.values():
            if rest:
                self._line(rest)
        self.file.close()


class Metrics:
    """Reads a growing metrics.jsonl."""

    def __init__(self, path: Path, measured: Sequence[ObjectiveValues]) -> None:
        self.path, self.measured = path, measured
        self._at = 0

    def look(self) -> bool:
        """Read new records; whether there were any."""
        try:
            with open(self.path, "rb") as file:
                file.seek(self._at)
                whole, newline, _ = file.read().rpartition(b"\n")
        except OSError:
            return False
        self._at += len(whole) + len(newline)
        for record in json_objects(whole.splitlines()):
            if isinstance(record.get("step"), int):
                for each in self.measured:
                    each.record(record)
        return bool(whole)
