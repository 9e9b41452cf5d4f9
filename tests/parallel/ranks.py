"""A pool of rank processes that do jobs on demand: what costs in a test of several ranks is importing torch.

The processes are forked from one that has imported everything, or spawned where they compute on a GPU: CUDA does not
survive a fork. A job is a function of this module's jobs, done by the first n of them as one world. A rank that raises
or does not answer in time fails the job, and the pool is replaced, since the ranks behind it may wait for something
that never comes.
"""

import contextlib
import gc
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
CRASHES = {-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGABRT}
SECONDS_TO_FOLLOW = 3.0  # What the others get to say when one rank has failed.


class RanksFailed(AssertionError):
    """What the ranks that failed had to say."""


class RanksCrashed(RanksFailed):
    """The same, where the system ended one of them for a fault in native code."""


class Ranks:
    """Up to eight processes, started when first needed and ended, by their ids, in `close`."""

    def __init__(self, folder: Path, start_method: str = "forkserver", seconds: float = 400, retries: int = 1) -> None:
        self.folder, self.seconds, self.retries = folder, seconds, retries
        self._context = get_context(start_method)
        self._context.set_forkserver_preload(["tests.parallel.jobs"])
        self._members: list[tuple[Any, Any]] = []

    def do(self, size: int, job: Callable[..., Any], *arguments: Any, seconds: float | None = None) -> list[Any]:
        """Have ranks 0 to size - 1 do a job together and return what each of them returned.

        A job whose rank was ended by a fault in native code is done once more, with a warning: gloo's own thread
        crashes once in some thousand jobs of processes that have had many worlds (docs/roadmap.md).
        """
        seconds = self.seconds if seconds is None else seconds
        try:
            return self._do(size, job, arguments, seconds)
        except RanksCrashed as crash:
            if not self.retries:
                raise
            warnings.warn(f"done once more: {crash}", stacklevel=2)
            return self._do(size, job, arguments, seconds)

    def _do(self, size: int, job: Callable[..., Any], arguments: tuple[Any, ...], seconds: float) -> list[Any]:
        from tests.conftest import free_port

        while len(self._members) < size:
            self._members.append(self._start())
        port = free_port()
        for rank, (_, wire) in enumerate(self._members[:size]):
            values = [rank, size, rank, size, "127.0.0.1", port] if size > 1 else []
            wire.send((dict(zip(PLACE, map(str, values), strict=False)), job, arguments))
        try:
            return self._answers(size, seconds)
        except RanksFailed as failed:
            for process, _ in self._members:
                process.join(0.2)  # The code of one that died may come a moment later than its silence.
            codes = [process.exitcode for process, _ in self._members]
            self.close()
            raise (RanksCrashed(str(failed)) if set(codes) & CRASHES else failed) from None
        except BaseException:
            self.close()
            raise

    def _answers(self, size: int, seconds: float) -> list[Any]:
        deadline = time.monotonic() + seconds
        answers: dict[int, Any] = {}
        failures: dict[int, str] = {}
        waiting = {wire: rank for rank, (_, wire) in enumerate(self._members[:size])}
        while waiting and (ready := wait(waiting, max(0.0, deadline - time.monotonic()))):
            for wire in ready:
                rank = waiting.pop(wire)
                try:
                    succeeded, answer = wire.recv()
                except EOFError:
                    succeeded, answer = False, "died"
                (answers if succeeded else failures)[rank] = answer
            if failures:
                deadline = min(deadline, time.monotonic() + SECONDS_TO_FOLLOW)
        failures |= dict.fromkeys(waiting.values(), "did not answer in time")
        if failures:
            raise RanksFailed("\n".join(f"rank {rank}: {reported}" for rank, reported in failures.items()))
        return [answers[rank] for rank in range(size)]

    def _start(self) -> tuple[Any, Any]:
        here, there = self._context.Pipe()
        process = self._context.Process(target=serve, args=(there, self.folder), daemon=True)
        process.start()
        there.close()
        return process, here

    def close(self, grace: float = 0.0) -> None:
        """End all processes of the pool; so many seconds they have to end by themselves."""
        for _, wire in self._members:
            wire.close()
        deadline = time.monotonic() + grace
        for process, _ in self._members:
            process.join(max(0.0, deadline - time.monotonic()))
            process.kill()
        for process, _ in self._members:
            process.join(10)
        self._members = []


def serve(wire: Any, folder: Path) -> None:
    """The life of a rank: jobs come in, results go out, until the other end is closed."""
    import torch
    import torch._dynamo
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    gc.freeze()  # Modules that were imported before the fork are not visited by each collection.
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)  # Memory that nobody has set is full of NaN.
    os.chdir(folder)
    quiet = open(os.devnull, "w")  # noqa: SIM115 - for as long as the process lives
    sys.stdout = sys.stderr = quiet
    with contextlib.suppress(EOFError, OSError):
        while True:
            place, job, arguments = wire.recv()
            for name in PLACE:
                os.environ.pop(name, None)
            os.environ.update(place)
            try:
                wire.send((True, job(*arguments)))
            except BaseException:
                wire.send((False, traceback.format_exc(limit=-6)))
            # A process group has threads of its own, which wake often, as long as it lives. Groups lie in cycles, and
            # DTensor's cache of shardings and compiled functions hold them. Dynamo also compiles a function only so
            # often, and this process has many models.
            _clear_sharding_prop_cache()
            torch._dynamo.reset()
            gc.collect()
