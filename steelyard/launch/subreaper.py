"""A command and all that it starts, ended together: `python -m steelyard.launch.subreaper COMMAND...`.

What a foreign command starts may leave its process group or outlive it, and whoever asked for it may be killed. The
guard stands in between. It adopts orphans (Linux), passes a request to stop on, kills what does not end in time, and
asks itself to stop when its own parent dies. Its exit code is the command's, 128 + N for signal N, 127 where the
command could not be started.
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
    """Start a command under a guard; both streams go to `output`."""
    guard = [sys.executable, "-P", str(Path(__file__)), str(os.getpid()), *command]
    return ProcessTree(
        subprocess.Popen(
            guard, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment,
            start_new_session=True,
        )
    )  # fmt: skip


class ProcessTree:
    """A command under guard, seen from outside."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process

    @property
    def code(self) -> int | None:
        """The exit code; None while it runs."""
        return self.process.poll()

    def ask(self, number: int) -> None:
        """Pass a request to stop on to the command: SIGTERM or SIGINT."""
        if self.process.poll() is None:
            self.process.send_signal(number)

    def stop(self) -> int:
        """Ask it to end, see that it does, and return its exit code."""
        if self.process.poll() is None:
            self.ask(signal.SIGTERM)
            try:
                self.process.wait(SECONDS_TO_END + 5)
            except subprocess.TimeoutExpired:
                self.process.kill()  # The kernel then kills the command.
        return self.process.wait()


def main(words: Sequence[str]) -> int:
    """Run a command, and leave nothing of it behind."""
    parent, *command = words
    asked: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, lambda number, _: asked.append(number))
    _ask_kernel(PR_SET_CHILD_SUBREAPER, 1)
    _ask_kernel(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(parent):
        return 128 + signal.SIGTERM
    try:
        process = subprocess.Popen(command, start_new_session=True, preexec_fn=_killed_with(os.getpid()))
    except OSError as error:
        sys.stderr.write(f"error: {command[0]} could not be started: {error.strerror}\n")
        return NOT_STARTED
    _wait(process, asked)
    _end_all()
    code = process.wait()
    return 128 - code if code < 0 else code


def _wait(process: subprocess.Popen[bytes], asked: list[int]) -> None:
    """Until the command has ended, or must."""
    deadline = float("inf")
    while not _has_ended(process.pid) and time.monotonic() < deadline:
        if asked and deadline == float("inf"):
            deadline = time.monotonic() + SECONDS_TO_END
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGINT if asked[0] == signal.SIGINT else signal.SIGTERM)
        time.sleep(SECONDS_BETWEEN_LOOKS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # Not waited for yet, so the number cannot be another's.


def _has_ended(process: int) -> bool:
    return os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _end_all() -> None:
    """Kill the children that are left, and those of theirs that come to us then."""
    while children := _children():
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        time.sleep(SECONDS_BETWEEN_LOOKS)


def _children() -> list[int]:
    """Our children that still run; on systems without /proc none are known."""
    me, found = str(os.getpid()), []
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent = status.read_text(errors="replace").rpartition(")")[2].split()[:2]
            if parent == me and state not in "ZX":
                found.append(int(status.parent.name))
    return found


def _ask_kernel(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)


def _killed_with(parent: int) -> Callable[[], None]:
    def ask() -> None:
        _ask_kernel(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(NOT_STARTED)

    return ask


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
