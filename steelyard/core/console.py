"""What a person sees while a command works.

Messages and progress go to standard error, so that standard output carries only results. On a terminal long work has
a bar; in a log the same work leaves a plain line every few seconds. There is one console per process, as there is one
terminal. Nothing it prints holds a secret.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from steelyard.core import secrets, units

SECONDS_BETWEEN_LINES = 5.0
# Set where a launcher keeps the two streams of a rank in two logs: what goes well then belongs in the first.
LOGGED = "STEELYARD_LOGGED"


class Console:
    """Standard error, with a voice that can be turned down."""

    def __init__(self) -> None:
        self.quiet = False
        self._bar: Any = None
        self._copy: IO[str] | None = None

    def say(self, message: str = "") -> None:
        """Print a message for the person watching; `--quiet` drops it."""
        if not self.quiet:
            self._print(message, sys.stdout if LOGGED in os.environ else None)

    def warn(self, message: str) -> None:
        """Print something that may matter; `--quiet` keeps it."""
        self._print(f"warning: {message}")

    def error(self, message: str) -> None:
        """Print why the command failed."""
        self._print(f"error: {message}")

    @contextmanager
    def copied_to(self, path: Path) -> Iterator[None]:
        """Also write every message of the block to a file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a", encoding="utf-8") as self._copy:
            try:
                yield
            finally:
                self._copy = None

    def trace(self, error: BaseException) -> None:
        """Print where an error came from."""
        self._print("".join(traceback.format_exception(error)).rstrip())

    def _print(self, message: str, stream: IO[str] | None = None) -> None:
        message = secrets.scrub(message)
        if self._copy is not None:
            with suppress(OSError):  # A full disk must not take the terminal's message with it.
                print(message, file=self._copy, flush=True)
        if self._bar is not None:
            self._bar.console.print(message, markup=False, highlight=False, soft_wrap=True)
        else:
            print(message, file=stream or sys.stderr, flush=True)

    @contextmanager
    def progress(
        self, task: str, total: float, unit: str, done: float = 0, lines: bool = True
    ) -> Iterator[ProgressBar]:
        """Show how far some work is, how fast it goes and how long it will take; `done` is what an earlier run did.

        Work that prints lines of its own needs none in a log (`lines=False`).
        """
        progress = ProgressBar(self, task, total, unit, done, lines)
        if self.quiet or self._bar is not None or not sys.stderr.isatty():
            yield progress
            return
        self._bar, progress.bar = _bar(task, total, done)
        try:
            with self._bar:
                yield progress
        finally:
            self._bar = None


class ProgressBar:
    """One piece of long work: `advance` it, and it shows itself."""

    def __init__(self, console: Console, task: str, total: float, unit: str, done: float, lines: bool) -> None:
        self.lines = lines
        self.console, self.task, self.total, self.unit = console, task, total, unit
        self.done = self.done_before = done
        self.bar: Any = None
        self.started = self.last_line = time.monotonic()

    def advance(self, amount: float = 1, note: str = "") -> None:
        """Say that `amount` more units are done; `note` is a short remark to show beside them."""
        self.done += amount
        now = time.monotonic()
        rate = (self.done - self.done_before) / max(now - self.started, 1e-9)
        speed = f"{units.count(rate)} {self.unit}/s"
        if self.bar is not None:
            self.bar.update(0, completed=self.done, detail="  ".join(filter(None, [note, speed])))
        elif self.lines and now - self.last_line >= SECONDS_BETWEEN_LINES:
            self.last_line = now
            left = units.duration((self.total - self.done) / rate) if rate else "unknown"
            share = f"{100 * self.done / self.total:3.0f}%" if self.total else ""
            line = (
                f"{self.task} {units.count(self.done)}/{units.count(self.total)} {share}  {speed}  {left} left  {note}"
            )
            self.console.say(line.rstrip())


def _bar(task: str, total: float, done: float) -> tuple[Any, Any]:
    from rich.console import Console as RichConsole
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=30),
        TaskProgressColumn(),
        TextColumn("{task.fields[detail]}"),
        TimeRemainingColumn(),
        TextColumn("left"),
        console=RichConsole(stderr=True),
        redirect_stdout=False,
        redirect_stderr=False,
    )
    bar.add_task(task, total=total, detail="")
    bar.update(bar.task_ids[0], completed=done)
    return bar, bar


console = Console()
