"""One trial: a command under guard, watched until it ends or must.

Its output is read line by line, freed of secrets, and kept in log.txt; `run/metrics.jsonl` in its folder is read as it
grows. A trial is ended when it takes too long, says nothing for too long, or is far behind the others.
"""

from __future__ import annotations

import json
import os
import selectors
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from steelyard.core import secrets
from steelyard.core.run import METRICS
from steelyard.launch import guard
from steelyard.tune import outcome
from steelyard.tune.command import STORAGE
from steelyard.tune.objective import Measured
from steelyard.tune.outcome import Ended

LOG = "log.txt"
RUN = "run"
SECONDS_BETWEEN_LOOKS = 0.25
SECONDS_TO_END = 0.02  # between a closed output and a process that is gone
SECONDS_BETWEEN_BEATS = 5.0
LONGEST_LINE = 1 << 20
TAIL = 200


@dataclass(frozen=True)
class Limits:
    """Seconds that a trial may take, and may say nothing."""

    timeout: float
    hang: float
    deadline: float = float("inf")
    """When, on the monotonic clock, the whole study must end."""


class Log:
    """The output of a command: lines without secrets, to a file and to the objectives."""

    def __init__(self, path: Path, measured: Sequence[Measured]) -> None:
        self.file: IO[str] = open(path, "w", encoding="utf-8")  # noqa: SIM115 (closed by close)
        self.measured = measured
        self.tail: deque[str] = deque(maxlen=TAIL)
        self._rest = b""

    def feed(self, data: bytes) -> None:
        """Take what has been read; a line counts once it is whole, so that no secret is cut in two."""
        self._rest += data.replace(b"\r", b"\n")
        *whole, self._rest = self._rest.split(b"\n")
        if len(self._rest) > LONGEST_LINE:
            whole, self._rest = [*whole, self._rest], b""
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
        """Take what is left, and close."""
        if self._rest:
            self._line(self._rest)
        self.file.close()


class Metrics:
    """A run's metrics.jsonl, read as it grows."""

    def __init__(self, path: Path, measured: Sequence[Measured]) -> None:
        self.path, self.measured = path, measured
        self._at = 0

    def look(self) -> bool:
        """Take the records that are new; whether there were any."""
        try:
            with open(self.path, "rb") as file:
                file.seek(self._at)
                whole, newline, _ = file.read().rpartition(b"\n")
        except OSError:
            return False
        self._at += len(whole) + len(newline)
        for line in whole.splitlines():
            try:
                record: Any = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict) and isinstance(record.get("step"), int):
                for each in self.measured:
                    each.record(record)
        return bool(whole)


def run(
    command: Sequence[str],
    folder: Path,
    measured: Sequence[Measured],
    limits: Limits,
    is_behind: Callable[[], str | None] = lambda: None,
    beat: Callable[[], None] = lambda: None,
) -> Ended:
    """Run a command to its end, or end it, and say how it ended. An interruption ends it too, and goes on."""
    began, kills = time.monotonic(), outcome.kills_by_memory()
    reading, writing = os.pipe()
    log = Log(folder / LOG, measured)
    metrics = Metrics(folder / RUN / METRICS, measured)
    try:
        guarded = guard.start(command, writing, {name: os.environ[name] for name in os.environ if name != STORAGE})
    finally:
        os.close(writing)
    try:
        verdict = _watch(reading, guarded, log, metrics, limits, is_behind, beat)
    finally:
        guarded.stop()  # An interruption comes through here as well.
        _drain(reading, log)
        metrics.look()
        log.close()
    seconds = time.monotonic() - began
    if verdict is not None:
        return Ended(*verdict, seconds)
    code = guarded.code or 0
    if code:
        return Ended(*outcome.of_exit(code, log.tail, outcome.kills_by_memory() > kills), seconds)
    missing = next((each.objective.label for each in measured if each.value is None), None)
    if missing is not None:
        return Ended(*outcome.of_silence(missing, log.tail), seconds)
    return Ended(outcome.FINISHED, "", seconds)


def _watch(
    reading: int,
    guarded: guard.Guarded,
    log: Log,
    metrics: Metrics,
    limits: Limits,
    is_behind: Callable[[], str | None],
    beat: Callable[[], None],
) -> tuple[str, str] | None:
    """Until the command has closed its output and ended; or the outcome and reason that it is to be ended with."""
    began = heard = beaten = looked = time.monotonic()
    with selectors.DefaultSelector() as selector:
        selector.register(reading, selectors.EVENT_READ)
        while guarded.code is None:
            if selector.get_map() and selector.select(SECONDS_BETWEEN_LOOKS):
                data = os.read(reading, 1 << 16)
                if not data:
                    selector.unregister(reading)
                log.feed(data)
                heard = time.monotonic()
            elif not selector.get_map():
                time.sleep(SECONDS_TO_END)
            now = time.monotonic()
            if now - looked > SECONDS_BETWEEN_LOOKS:
                looked, heard = now, now if metrics.look() else heard
                behind = is_behind()
                if behind is not None:
                    return outcome.STOPPED_EARLY, behind
            if now - beaten > SECONDS_BETWEEN_BEATS:
                beat()
                beaten = now
            if now - began > limits.timeout:
                return outcome.TIMED_OUT, f"not done after {limits.timeout:g} s"
            if now > limits.deadline:
                return outcome.CUT_SHORT, "the study's hours were over"
            if now - heard > limits.hang:
                return outcome.HUNG, f"no output and no record for {limits.hang:g} s"
    return None


def _drain(reading: int, log: Log) -> None:
    """Take what is still in the pipe; nobody writes any more."""
    os.set_blocking(reading, False)
    try:
        while data := os.read(reading, 1 << 16):
            log.feed(data)
    except BlockingIOError:
        pass
    finally:
        os.close(reading)
