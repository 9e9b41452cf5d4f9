"""Commands that are killed at a moment uniform over their run, then started again.

The second start must lead to what an undisturbed command leads to, whatever the first one left, and no process of the
first may live on. Half of the kills hit the command alone, as the out-of-memory killer does, half its whole group.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests import preloaded
from tests.faults.outcome import Result, Tally, judge, run
from tests.faults.targets import (
    CONVERT,
    CONVERTED,
    _corpus,
    _model,
    _tokenize,
    _workplace,
    files_written,
    metrics,
)

GONE_SECONDS = 120
SAVING = ("train.steps=8", "checkpoint.every=1", "eval.every=4", "log.every=1", "train.compile=false")


@dataclass(frozen=True)
class Scenario:
    """A command to kill."""

    name: str
    build: Callable[[Path], None]
    command: Sequence[str]
    behaviour: Callable[[Path, Result], object]


def _train(name: str, *words: str) -> Scenario:
    return Scenario(name, _workplace, ("train", "tiny.toml", *SAVING, *words, "--run", "run"), metrics("run"))


SCENARIOS = [
    _train("train"),
    _train("train, zero 1", "--nproc", "2", "parallel.zero=1"),
    _train("train, zero 3", "--nproc", "2", "parallel.zero=3"),
    _train("train, tensor 2", "--nproc", "2", "parallel.tensor=2"),
    _train("train, pipeline 2", "--nproc", "2", "parallel.pipeline=2"),
    Scenario("data tokenize", _corpus, _tokenize("text.jsonl"), files_written("out*.bin", "out*.idx", "out*.sums")),
    Scenario("checkpoint convert", _model, CONVERT, CONVERTED),
    Scenario("prune", _model, ("prune", "model", "pruned", "--method", "magnitude"), files_written("pruned/*")),
]


def kill_once(scenario: Scenario, sound: Path, copy: Path, seconds: float, alone: bool, expected: object) -> tuple:
    """Start, kill after so many seconds, start again; gives the outcome and what the second start said."""
    shutil.copytree(sound, copy)
    try:
        process = preloaded.Popen(
            [sys.executable, "-P", "-m", "steelyard", *scenario.command], cwd=copy, stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
        with contextlib.suppress(ProcessLookupError):
            process.kill() if alone else os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if left := _left_in(copy):
            return "hang", f"processes live on: {left}"
        result = run(copy, [scenario.command])
        if result.code == 2 and re.search("exists|is there already", result.err):  # It was done before it was killed.
            result = Result(0, result.out, result.err)
        seen = scenario.behaviour(copy, result) if result.code == 0 else None
        outcome = judge(result, seen, expected)
        return ("silent" if outcome == "detected" else outcome), result.err.strip()[-300:]
    finally:
        for pid in _left_in(copy, wait=0):
            os.kill(pid, signal.SIGKILL)
        shutil.rmtree(copy)


def _left_in(folder: Path, wait: float = GONE_SECONDS) -> list[int]:
    """Processes that still have a folder as their working directory after a while.

    Each thread is looked at: that of the main thread is gone before the others have closed the process's files.
    """
    end = time.monotonic() + wait
    while True:
        found = set()
        for thread in Path("/proc").glob("[0-9]*/task/*"):
            with contextlib.suppress(OSError):
                if (thread / "cwd").readlink() == folder:
                    found.add(int(thread.parts[2]))
        if not found or time.monotonic() >= end:
            return sorted(found)
        time.sleep(0.2)


def kill(scenario: Scenario, count: int, seed: int) -> Tally:
    """Kill a command `count` times, each time from the beginning."""
    rng, tally = random.Random(f"{seed} {scenario.name}"), Tally()
    with tempfile.TemporaryDirectory(prefix="faults-") as made:
        folder = Path(made).resolve()
        scenario.build(folder / "sound")
        shutil.copytree(folder / "sound", folder / "reference")
        began = time.monotonic()
        result = run(folder / "reference", [scenario.command])
        seconds = time.monotonic() - began
        assert result.code == 0, f"{scenario.name}: {result.err}"
        expected = scenario.behaviour(folder / "reference", result)
        for number in range(count):
            after, alone = rng.uniform(0, seconds), number % 2 == 0
            copy = folder / f"copy-{number}"
            outcome, said = kill_once(scenario, folder / "sound", copy, after, alone, expected)
            tally.add(outcome, f"{scenario.name} killed after {after:.2f} s of {seconds:.2f}: {said}")
    return tally


def kill_all(count: int, seed: int, scenarios: Sequence[Scenario] = SCENARIOS) -> dict[str, Tally]:
    """`count` kills, spread evenly over the scenarios."""
    shares = [count // len(scenarios) + (number < count % len(scenarios)) for number in range(len(scenarios))]
    return {each.name: kill(each, share, seed) for each, share in zip(scenarios, shares, strict=True) if share}
