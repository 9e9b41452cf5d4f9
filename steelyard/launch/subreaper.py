"""Runs a command and ends it together with all of its descendants: `python -m steelyard.launch.subreaper COMMAND...`.

Descendants of a third-party command may leave its process group or outlive it, and the caller may be killed. The
subreaper runs between the two. It adopts orphans (Linux), forwards stop signals, kills what does not exit in time, and
gets SIGTERM when its own parent dies. Its exit code is that of the command, 128 + N for signal N, or 127 if the command
could not be started.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

SECONDS_TO_END = 10.0  # from SIGTERM to SIGKILL
SECONDS_BETWEEN_LOOKS = 0.02
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
NOT_STARTED = 127


def start(command: Sequence[str], output: int | IO[Any], environment: dict[str, str] | None = None) -> ProcessTree:
    """Start a command under a subreaper. Both streams go to `output`."""
    subreaper = [sys.executable, "-P", str(Path(__file__)), str(os.getpid()), *command]
    return ProcessTree(
        subprocess.Popen(
            subreaper, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment,
            start_new_session=True,
        )
    )  # fmt: skip


class ProcessTree:
    """A command that runs under a subreaper, as its caller sees it."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process

    @property
    def code(self) -> int | None:
        """The exit code; None while the command runs."""
        return self.process.poll()

    def ask(self, number: int) -> None:
        """Forward a stop signal to the command: SIGTERM or SIGINT."""
        if self.process.poll() is None:
            self.process.send_signal(number)

    def stop(self) -> int:
        """Send SIGTERM, kill the command if it does not exit, and return its exit code."""
        if self.process.poll() is None:
            self.ask(signal.SIGTERM)
            try:
                self.process.wait(SECONDS_TO_END + 5)
            except subprocess.TimeoutExpired:
                self.process.kill()  # The kernel then kills the command.
        return self.process.wait()


def main(arguments: Sequence[str]) -> int:
    """Run a command and end all of its descendants."""
    parent, *command = arguments
    stop_signals: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, lambda number, _: stop_signals.append(number))
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    _prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(parent):
        return 128 + signal.SIGTERM
    try:
        process = subprocess.Popen(command, start_new_session=True, preexec_fn=_killed_with(os.getpid()))
    except OSError as error:
        sys.stderr.write(f"error: {command[0]} could not be started: {error.strerror}\n")
        return NOT_STARTED
    _wait(process, stop_signals)
    _end_all()
    code = process.wait()
    return 128 - code if code < 0 else code


def _wait(process: subprocess.Popen[bytes], stop_signals: list[int]) -> None:
    """Wait until the command exits. After a stop signal, kill it when the grace period is over."""
    deadline = float("inf")
    while not _has_ended(process.pid) and time.monotonic() < deadline:
        if stop_signals and deadline == float("inf"):
            deadline = time.monotonic() + SECONDS_TO_END
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGINT if stop_signals[0] == signal.SIGINT else signal.SIGTERM)
        time.sleep(SECONDS_BETWEEN_LOOKS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # Not reaped yet, so the pid cannot be reused.


def _has_ended(process: int) -> bool:
    return os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _end_all() -> None:
    """Kill the remaining children, and the orphans that this process adopts as a result."""
    while children := _children():
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        time.sleep(SECONDS_BETWEEN_LOOKS)


def _children() -> list[int]:
    """The running children of this process; an empty list on systems without /proc."""
    me, found = str(os.getpid()), []
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent = status.read_text(errors="replace").rpartition(")")[2].split()[:2]
            if parent == me and state not in "ZX":
                found.append(int(status.parent.name))
    return found


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)


def _killed_with(parent: int) -> Callable[[], None]:
    def request() -> None:
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(NOT_STARTED)

    return request


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
