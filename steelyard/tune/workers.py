"""Several workers on this machine: the same command once for each, with its share of the GPUs, ended together."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence

from steelyard.core.console import console
from steelyard.core.errors import Fault, Interrupted, UserError
from steelyard.launch import guard
from steelyard.tune.command import steelyard
from steelyard.tune.machine import named_gpus, visible_gpus

SECONDS_BETWEEN_LOOKS = 0.1


def run(arguments: Sequence[str], workers: int) -> None:
    """Run a command as so many workers until all have ended. An interruption reaches them all."""
    running: list[guard.Guarded] = []
    try:
        for worker, environment in enumerate(shares(workers)):
            command = steelyard(*arguments, "--worker", str(worker))
            running.append(guard.start(command, sys.stderr, os.environ | environment))
        while any(each.code is None for each in running):
            time.sleep(SECONDS_BETWEEN_LOOKS)
    except Interrupted:
        for each in running:
            each.ask(signal.SIGINT)
        deadline = time.monotonic() + guard.SECONDS_TO_END + 5
        while any(each.code is None for each in running) and time.monotonic() < deadline:
            time.sleep(SECONDS_BETWEEN_LOOKS)
        raise Interrupted("what was learned is kept; the same command goes on") from None
    finally:
        for each in running:
            each.stop()
    codes = [each.code or 0 for each in running]
    if any(codes):
        kind = UserError if all(code == UserError.exit_code for code in codes) else Fault
        wrong = sum(code != 0 for code in codes)
        raise kind(f"{wrong} of {workers} workers failed", mend="what they said stands above; trials are kept")


def shares(workers: int) -> list[dict[str, str]]:
    """What each worker may use: equal shares of the GPUs at hand, and of nothing where there are none."""
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = named_gpus(allowed) if allowed else []
    gpus = gpus or [str(number) for number in range(len(visible_gpus()))]
    if not gpus:
        return [{} for _ in range(workers)]
    each = len(gpus) // workers
    if each == 0:
        raise UserError(f"{workers} workers cannot share {len(gpus)} GPUs", mend=f"--workers {len(gpus)}")
    if len(gpus) % workers:
        console.warn(f"{len(gpus) % workers} GPUs stay idle: {workers} workers have {each} each")
    return [{"CUDA_VISIBLE_DEVICES": ",".join(gpus[n * each : (n + 1) * each])} for n in range(workers)]
