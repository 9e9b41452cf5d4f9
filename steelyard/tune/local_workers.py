"""Several workers on this machine: the same command for each, with its share of the devices; all end together."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from steelyard.core.console import console
from steelyard.core.errors import Interrupted, RuntimeFailure, UserError
from steelyard.core.host import die_with_parent, usable_cpus
from steelyard.launch import backends, subreaper
from steelyard.tune.command import steelyard
from steelyard.tune.this_machine import named_gpus, visible_gpus

SECONDS_BETWEEN_LOOKS = 0.1


def run(arguments: Sequence[str], workers: int, on: str | None = None) -> None:
    """Run a command in `workers` processes until all have ended. An interruption is passed on to all.

    If trials run on other machines, the devices of this one are not divided.
    """
    running: list[subreaper.ProcessTree] = []
    alone = Share(usable_cpus(), {})
    is_remote = on is not None and backends.load(on).is_remote
    try:
        for worker, share in enumerate([alone] * workers if is_remote else shares(workers)):
            command = steelyard(*arguments, "--worker", str(worker))
            with _on(share.cores):
                running.append(_started(command, os.environ | share.environment, are_jobs=on is not None))
        while any(each.code is None for each in running):
            time.sleep(SECONDS_BETWEEN_LOOKS)
    except Interrupted:
        for each in running:
            each.ask(signal.SIGINT)
        deadline = time.monotonic() + subreaper.SECONDS_TO_END + 5
        while any(each.code is None for each in running) and time.monotonic() < deadline:
            time.sleep(SECONDS_BETWEEN_LOOKS)
        raise Interrupted("all results are saved; the same command continues the study") from None
    finally:
        for each in running:
            each.stop()
    codes = [each.code or 0 for each in running]
    if any(codes):
        kind = UserError if all(code == UserError.exit_code for code in codes) else RuntimeFailure
        wrong = sum(code != 0 for code in codes)
        raise kind(f"{wrong} of {workers} workers failed", hint="see their messages above; finished trials are saved")


def _started(command: Sequence[str], environment: dict[str, str], are_jobs: bool) -> subreaper.ProcessTree:
    """Start a worker that dies with this process.

    A subreaper also ends all processes that the worker started. This is right for a local trial but not for jobs,
    which survive a killed tuner.
    """
    if not are_jobs:
        return subreaper.start(command, sys.stderr, environment)
    return subreaper.ProcessTree(
        subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=sys.stderr, stderr=sys.stderr, env=environment,
            start_new_session=True, preexec_fn=die_with_parent(),
        )
    )  # fmt: skip


@dataclass(frozen=True)
class Share:
    """The resources of one worker: CPU cores, and the GPUs in its environment."""

    cores: list[int]
    environment: dict[str, str]


def shares(workers: int) -> list[Share]:
    """Equal shares of the visible GPUs or, without GPUs, of the cores."""
    cores = usable_cpus()
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = named_gpus(allowed) if allowed else []
    gpus = gpus or [str(number) for number in range(len(visible_gpus()))]
    if not gpus:
        return [Share(own, {}) for own in shared_out(cores, workers)]
    each = len(gpus) // workers
    if each == 0:
        raise UserError(f"{workers} workers cannot share {len(gpus)} GPUs", hint=f"use --workers {len(gpus)}")
    if len(gpus) % workers:
        console.warn(f"{len(gpus) % workers} GPUs are not used: {workers} workers have {each} each")
    return [Share(cores, {"CUDA_VISIBLE_DEVICES": ",".join(gpus[n * each : (n + 1) * each])}) for n in range(workers)]


def shared_out(cores: Sequence[int], workers: int) -> list[list[int]]:
    """The cores of each worker: the same number, so that trials are comparable. More workers than cores share cores."""
    each = len(cores) // workers
    if each == 0:
        console.warn(f"{workers} workers on {len(cores)} cores: trials slow each other down")
        return [[cores[worker % len(cores)]] for worker in range(workers)]
    return [list(cores[worker * each : (worker + 1) * each]) for worker in range(workers)]


@contextmanager
def _on(cores: Sequence[int]) -> Iterator[None]:
    """Start processes on these cores only. Children inherit the affinity from their first instruction."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
