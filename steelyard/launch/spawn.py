"""Ranks on this machine: started together, told together, ended together.

Rank 0 has the terminal; what the others print is kept and shown only for the one that failed. Ranks live in sessions of
their own, so that a Ctrl-C reaches them once, from here. When one fails, the others usually notice and end; those that
do not are ended, so that a job never hangs longer than a few seconds behind its first failure, and never outlives its
launcher: the kernel kills the ranks when the launcher dies.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

from steelyard.core.console import console
from steelyard.core.host import die_with_parent, usable_cpus
from steelyard.launch.error_file import ERROR_FILE, find
from steelyard.launch.root_cause import RankExit, blame
from steelyard.parallel.rendezvous import MEETING

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
SECONDS_TO_NOTICE = 5.0  # from the first failure to SIGTERM
SECONDS_TO_END = 5.0  # from SIGTERM to SIGKILL
SECONDS_BETWEEN_LOOKS = 0.05
SAME_REQUEST_SECONDS = 1.0
SHOW_CURSOR = "\x1b[?25h"


def run(command: Sequence[str], nproc: int) -> int:
    """Run a command as `nproc` ranks and return the exit code of the job."""
    with TemporaryDirectory(prefix="steelyard-") as folder, signals() as asked:
        ranks: list[Rank] = []
        try:
            for rank in range(nproc):
                environment = _environment(rank, nproc, meeting=folder)
                ranks.append(Rank(command, rank, environment, Path(folder), keep_output=rank > 0))
            hung = watch(ranks, asked)
        finally:
            for rank_ in ranks:
                rank_.kill()
            if any(rank_.was_killed for rank_ in ranks) and sys.stderr.isatty():
                sys.stderr.write(SHOW_CURSOR)
        return _tell(ranks, hung, was_asked=bool(asked), debug="--debug" in command)


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
        """Whether the rank still runs; what an ended one started is ended with it."""
        if self.code is None and os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)  # Before wait(), while the number cannot be another's.
            self.code, self.ended_at = self.process.wait(), time.time()
        return self.code is None

    def send(self, number: int) -> None:
        """Send a signal, if there is still someone to get it."""
        if self.is_running():
            self.sent.add(number)
            os.kill(self.process.pid, number)

    def kill(self) -> None:
        """End the rank and all it started, now."""
        if self.is_running():
            self.was_killed = True
            self.sent.add(signal.SIGKILL)
            os.killpg(self.process.pid, signal.SIGKILL)
            os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)
            self.is_running()

    def ended(self) -> RankExit:
        """How it ended, for blame."""
        return RankExit(self.rank, self.code or 0, self.ended_at, frozenset(self.sent), find(self.error_file))


def watch(ranks: list[Rank], asked: list[int], failed_elsewhere: Sequence[int] = ()) -> list[int]:
    """Pass signals on until all ranks have ended, or must; returns the ranks that did not notice a failure.

    `failed_elsewhere` is not empty any more once a rank has failed that is not among these.
    """
    forwarded, failed_at = 0, None
    hung: list[int] = []
    while running := [rank for rank in ranks if rank.is_running()]:
        now = time.monotonic()
        for number in asked[forwarded:]:
            for rank in running:
                rank.send(number)
        forwarded = len(asked)
        # Whoever asks twice does not want to wait for ranks that cannot hear.
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


def _tell(ranks: list[Rank], hung: list[int], was_asked: bool, debug: bool) -> int:
    """Name the one error that counts, and return its exit code."""
    cause = blame([rank.ended() for rank in ranks], hung, was_asked)
    if cause is None:
        return 0
    console.error(cause.message)
    if cause.rank and (debug or not cause.has_words):
        text = ranks[cause.rank].output.read_text(encoding="utf-8", errors="replace").strip()
        if text:
            console.say("\n".join(["  its last lines:", *(f"  | {line}" for line in text.splitlines()[-20:])]))
    return cause.exit_code


def _environment(rank: int, nproc: int, meeting: str) -> dict[str, str]:
    """What torchrun would set, but for the port, which rank 0 takes; nothing of an outer torchrun may shine through."""
    outer = ("TORCHELASTIC_", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(outer)}
    threads = max(1, len(usable_cpus()) // nproc)
    return {"OMP_NUM_THREADS": str(threads)} | environment | {
        "RANK": str(rank), "WORLD_SIZE": str(nproc), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(nproc),
        "MASTER_ADDR": "127.0.0.1", MEETING: meeting,
    }  # fmt: skip


@contextmanager
def signals(same: float = SAME_REQUEST_SECONDS) -> Iterator[list[int]]:
    """Collect the requests to stop, in order; what follows within `same` seconds is one request over another road."""
    asked: list[int] = []
    asked_at = -math.inf

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal asked_at
        if time.monotonic() - asked_at > same:
            asked_at = time.monotonic()
            asked.append(number)

    previous = {number: signal.signal(number, note) for number in FORWARDED}
    try:
        yield asked
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
