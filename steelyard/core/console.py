"""Messages and progress of a command.

They go to standard error, so that standard output holds only results. On a terminal, long tasks show a progress bar;
in a log file they print a plain line every few seconds. There is one console per process. It removes secrets from
everything it prints.

No task is silent: while one runs (`progress`, or `working` for a whole command), a thread prints how far it is if
nothing else was printed for a while. So work that cannot count its steps, such as a library call, needs no code.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from steelyard.core import secrets, units

SECONDS_BETWEEN_LINES = 5.0
# The longest silence while a task runs.
SILENT_ON_TERMINAL, SILENT_IN_LOG = 8.0, 45.0
SECONDS_BETWEEN_LOOKS = 1.0
# Set by a launcher that logs the two streams of a rank to two files: `say` then prints to standard output.
LOGGED = "STEELYARD_LOGGED"


class Console:
    """Prints to standard error; `quiet` drops messages that are neither warnings nor errors."""

    def __init__(self) -> None:
        self.quiet = False
        self._bar: Any = None
        self._copy: IO[str] | None = None
        self._tasks: list[ProgressBar] = []
        self._printed = time.monotonic()

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
        self._printed = time.monotonic()
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
        with self._running(progress), self._shown(progress):
            yield progress

    @contextmanager
    def working(self, task: str) -> Iterator[None]:
        """Show that a task of unknown length is running, if it prints nothing else for a while."""
        with self._running(ProgressBar(self, task, 0, "", 0, lines=False)):
            yield

    def let_others_print(self) -> None:
        """Print nothing about running tasks from here on: another process prints to the same terminal or log."""
        self._tasks.clear()

    @contextmanager
    def _running(self, task: ProgressBar) -> Iterator[None]:
        """The innermost running task. The outermost starts the thread that watches for silence."""
        self._tasks.append(task)
        ended, is_first = threading.Event(), len(self._tasks) == 1
        if is_first:
            self._printed = time.monotonic()
            threading.Thread(target=self._break_silence, args=[ended], daemon=True, name="console").start()
        try:
            yield
        finally:
            ended.set()
            if task in self._tasks:
                self._tasks.remove(task)

    def _break_silence(self, ended: threading.Event) -> None:
        """Print the progress of the innermost task whenever nothing was printed for a while."""
        while not ended.wait(SECONDS_BETWEEN_LOOKS):
            self.tick()

    def tick(self) -> None:
        """Print the progress of the innermost task if the silence has been long. A bar refreshes itself."""
        longest = SILENT_ON_TERMINAL if sys.stderr.isatty() else SILENT_IN_LOG
        if self._tasks and self._bar is None and time.monotonic() - self._printed >= longest:
            self._printed = time.monotonic()  # also with `quiet`, which prints nothing
            with suppress(IndexError, OSError, ValueError):  # The task, or the stream, may end right now.
                self.say(self._tasks[-1].line())

    @contextmanager
    def _shown(self, progress: ProgressBar) -> Iterator[None]:
        """Show a bar on a terminal. A task within another adds its row below."""
        if self.quiet or not sys.stderr.isatty():
            yield
        elif self._bar is not None:
            progress.bar = self._bar
            progress.row = _add_row(self._bar, progress)
            try:
                yield
            finally:
                progress.bar.remove_task(progress.row)
        else:
            self._bar = progress.bar = _bar()
            progress.row = _add_row(self._bar, progress)
            try:
                with self._bar:
                    yield
            finally:
                self._bar = None


class ProgressBar:
    """The progress of one task; `advance` updates the display. `total` is 0 if it is not known."""

    def __init__(self, console: Console, task: str, total: float, unit: str, done: float, lines: bool) -> None:
        self.lines = lines
        self.console, self.task, self.total, self.unit = console, task, total, unit
        self.done = self.done_before = done
        self.bar: Any = None
        self.row: Any = None
        self.note = ""
        self.started = self.last_line = time.monotonic()

    def advance(self, amount: float = 1, note: str = "") -> None:
        """Add `amount` completed units; `note` is a short text to show with them."""
        self.done += amount
        self.note = note
        now = time.monotonic()
        if self.bar is not None:
            self.bar.update(self.row, completed=self.done, detail="  ".join(filter(None, [note, self._speed()])))
        elif self.lines and now - self.last_line >= SECONDS_BETWEEN_LINES:
            self.last_line = now
            self.console.say(self.line())

    def expect(self, total: float) -> None:
        """Correct a total that is only estimated."""
        self.total = total
        if self.bar is not None:
            self.bar.update(self.row, total=total or None)

    def line(self) -> str:
        """The progress as a line of a log."""
        if not self.unit:
            return f"{self.task}: running for {units.duration(time.monotonic() - self.started)}"
        share = left = ""
        if self.total:
            rate, share = self._rate(), f" {100 * self.done / self.total:3.0f}%"
            left = f"  {units.duration((self.total - self.done) / rate) if rate else 'unknown'} left"
        done = f"{units.count(self.done)}/{units.count(self.total)}" if self.total else units.count(self.done)
        return f"{self.task} {done}{share}  {self._speed()}{left}  {self.note}".rstrip()

    def _rate(self) -> float:
        return (self.done - self.done_before) / max(time.monotonic() - self.started, 1e-9)

    def _speed(self) -> str:
        if self.unit == "s":  # A task with a time limit: its rate says nothing.
            return ""
        return f"{units.count(self._rate())} {self.unit}/s"


def _bar() -> Any:
    from rich.console import Console as RichConsole
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=30),
        TaskProgressColumn(),
        TextColumn("{task.fields[detail]}"),
        TimeElapsedColumn(),  # changes every second, so that a slow task is seen to run
        TimeRemainingColumn(),
        TextColumn("left"),
        console=RichConsole(stderr=True),
        redirect_stdout=False,
        redirect_stderr=False,
    )


def _add_row(bar: Any, progress: ProgressBar) -> Any:
    return bar.add_task(progress.task, total=progress.total or None, completed=progress.done, detail="")


console = Console()
