"""Starts ranks on this machine, forwards signals to them, and ends them together.

Rank 0 writes to the terminal. Output of the other ranks is captured and shown only for a rank that failed. Ranks have
their own sessions, so that a Ctrl-C reaches them once, from here. When a rank fails, the others usually notice and
exit. Those that do not are killed, so that a job never hangs longer than a few seconds after its first failure. The
kernel kills the ranks when the launcher dies.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

from steelyard.core.console import console
from steelyard.core.file_tail import last_lines
from steelyard.core.host import die_with_parent, usable_cpus
from steelyard.launch.error_file import ERROR_FILE, find
from steelyard.launch.root_cause import RankExit, find_root_cause
from steelyard.parallel.rendezvous import RDZV_ID

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
SECONDS_TO_NOTICE = 5.0  # from the first failure to SIGTERM
SECONDS_TO_END = 5.0  # from SIGTERM to SIGKILL
SECONDS_BETWEEN_LOOKS = 0.05
SAME_REQUEST_SECONDS = 1.0
SHOW_CURSOR = "\x1b[?25h"


def run(command: Sequence[str], nproc: int) -> int:
    """Run a command as `nproc` ranks and return the exit code of the job."""
    with TemporaryDirectory(prefix="steelyard-") as folder, signals() as stop_signals:
        ranks: list[Rank] = []
        try:
            for rank in range(nproc):
                # What torchrun would set, except the port, which rank 0 binds.
                environment = rank_environment(nproc, {
                    "RANK": str(rank), "WORLD_SIZE": str(nproc), "LOCAL_RANK": str(rank),
                    "LOCAL_WORLD_SIZE": str(nproc), "MASTER_ADDR": "127.0.0.1", RDZV_ID: folder,
                })  # fmt: skip
                ranks.append(Rank(command, rank, environment, Path(folder), keep_output=rank > 0))
            hung = watch(ranks, stop_signals)
        finally:
            for rank_ in ranks:
                rank_.kill()
            if any(rank_.was_killed for rank_ in ranks) and sys.stderr.isatty():
                sys.stderr.write(SHOW_CURSOR)
        return _report(ranks, hung, was_asked=bool(stop_signals), debug="--debug" in command)


class Rank:
    """One process of the job."""

    def __init__(
        self, command: Sequence[str], rank: int, environment: dict[str, str], folder: Path, keep_output: bool
    ) -> None:
        self.rank = rank
        self.error_file, self.output = folder / f"rank-{rank}.json", folder / f"rank-{rank}.out"
        self.code: int | None = None
        self.ended_at = 0.0
        self.sent: set[int] = set()
        self.was_killed = False
        with open(self.output, "wb") as output:
            self.process = self._started(command, environment, output if keep_output else None)

    def _started(self, command: Sequence[str], environment: dict[str, str], output: Any) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            command,
            env=environment | {ERROR_FILE: str(self.error_file)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=die_with_parent(),
        )

    def is_running(self) -> bool:
        """Whether the rank still runs. Kills the processes that a finished rank has left."""
        if self.code is None and os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)  # Before wait(), while the pid cannot be reused.
            self.code, self.ended_at = self.process.wait(), time.time()
        return self.code is None

    def send(self, number: int) -> None:
        """Send a signal if the rank still runs."""
        if self.is_running():
            self.sent.add(number)
            os.kill(self.process.pid, number)

    def kill(self) -> None:
        """Kill the rank and its process group."""
        if self.is_running():
            self.was_killed = True
            self.sent.add(signal.SIGKILL)
            os.killpg(self.process.pid, signal.SIGKILL)
            os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)
            self.is_running()

    def ended(self) -> RankExit:
        """How the rank ended, for `find_root_cause`."""
        return RankExit(self.rank, self.code or 0, self.ended_at, frozenset(self.sent), find(self.error_file))


def watch(
    ranks: list[Rank],
    stop_signals: list[int],
    failed_elsewhere: Sequence[int] = (),
    is_over: Callable[[], bool] | None = None,
) -> list[int]:
    """Forward signals until all ranks have ended or are overdue. Returns the ranks that did not notice a failure.

    `failed_elsewhere` becomes non-empty when a rank fails that is not in `ranks`; `is_over` ends the wait at once.
    """
    forwarded, failed_at = 0, None
    hung: list[int] = []
    while running := [rank for rank in ranks if rank.is_running()]:
        now = time.monotonic()
        if is_over is not None and is_over():
            break
        for number in stop_signals[forwarded:]:
            for rank in running:
                rank.send(number)
        forwarded = len(stop_signals)
        # A second request means: do not wait for ranks that do not respond.
        if failed_at is None and (forwarded > 1 or failed_elsewhere or any(rank.code for rank in ranks)):
            failed_at = now
        if failed_at is not None and now > failed_at + SECONDS_TO_NOTICE + SECONDS_TO_END:
            break
        if failed_at is not None and now > failed_at + SECONDS_TO_NOTICE and not hung:
            hung = [rank.rank for rank in running]
            for rank in running:
                rank.send(signal.SIGTERM)
        time.sleep(SECONDS_BETWEEN_LOOKS)
    return hung


def _report(ranks: list[Rank], hung: list[int], was_asked: bool, debug: bool) -> int:
    """Report the root cause and return its exit code."""
    cause = find_root_cause([rank.ended() for rank in ranks], hung, was_asked)
    if cause is None:
        return 0
    console.error(cause.message)
    if cause.rank and (debug or not cause.has_words):
        lines = last_lines(ranks[cause.rank].output, 20)
        if any(map(str.strip, lines)):
            console.say("\n".join(["  its last lines:", *(f"  | {line}" for line in lines)]))
    return cause.exit_code


def rank_environment(ranks: int, variables: dict[str, str]) -> dict[str, str]:
    """The environment of one of the ranks of this host: the given variables instead of those of an outer launcher."""
    outer = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    kept = {name: each for name, each in os.environ.items() if not (name in outer or name.startswith("TORCHELASTIC_"))}
    threads = max(1, len(usable_cpus()) // ranks)  # torchrun would set 1.
    return {"OMP_NUM_THREADS": str(threads)} | kept | variables


@contextmanager
def signals(same: float = SAME_REQUEST_SECONDS) -> Iterator[list[int]]:
    """Collect stop signals in order. Signals within `same` seconds of one count as the same request, sent twice."""
    stop_signals: list[int] = []
    received_at = -math.inf

    def receive(number: int, frame: FrameType | None) -> None:
        nonlocal received_at
        if time.monotonic() - received_at > same:
            received_at = time.monotonic()
            stop_signals.append(number)

    previous = {number: signal.signal(number, receive) for number in FORWARDED}
    try:
        yield stop_signals
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
