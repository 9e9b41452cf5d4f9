"""Messages and progress of a command.

They go to standard error, so that standard output holds only results. On a terminal, long tasks show a progress bar;
in a log file they print a plain line every few seconds. There is one console per process. It removes secrets from
everything it prints.
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
# Set by a launcher that logs the two streams of a rank to two files: `say` then prints to standard output.
LOGGED = "STEELYARD_LOGGED"


class Console:
    """Prints to standard error; `quiet` drops messages that are neither warnings nor errors."""

    def __init__(self) -> None:
        self.quiet = False
        self._bar: Any = None
        self._copy: IO[str] | None = None

    def say(self, message: str = "") -> None:
        """Print a message; `--quiet` drops it."""
        if not self.quiet:
            self._print(message, sys.stdout if LOGGED in os.environ else None)

    def warn(self, message: str) -> None:
        """Print a warning, also with `--quiet`."""
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
        """Print the traceback of an error."""
        self._print("".join(traceback.format_exception(error)).rstrip())

    def _print(self, message: str, stream: IO[str] | None = None) -> None:
        message = secrets.scrub(message)
        if self._copy is not None:
            with suppress(OSError):  # The terminal must get the message even if the disk is full.
                print(message, file=self._copy, flush=True)
        if self._bar is not None:
            self._bar.console.print(message, markup=False, highlight=False, soft_wrap=True)
        else:
            print(message, file=stream or sys.stderr, flush=True)

    @contextmanager
    def progress(
        self, task: str, total: float, unit: str, done: float = 0, lines: bool = True
    ) -> Iterator[ProgressBar]:
        """Show the progress, rate and remaining time of a task; `done` is what an earlier run completed.

        `lines=False` prints no lines in a log, for tasks that print their own.
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
    """The progress of one task; `advance` updates the display."""

    def __init__(self, console: Console, task: str, total: float, unit: str, done: float, lines: bool) -> None:
        self.lines = lines
        self.console, self.task, self.total, self.unit = console, task, total, unit
        self.done = self.done_before = done
        self.bar: Any = None
        self.started = self.last_line = time.monotonic()

    def advance(self, amount: float = 1, note: str = "") -> None:
        """Add `amount` completed units; `note` is a short text to show with them."""
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
