"""Run a command on damaged input and say what became of it."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests import preloaded

LIMIT_SECONDS = 300  # A hundred times what these commands need.
OUTCOMES = ("detected", "unchanged", "silent", "traceback", "hang")
"""What a command did: refused with a message; gave the same result; gave another one; failed otherwise; never ended."""

INTERNAL = re.compile(r"Traceback \(most recent call last\)|a bug in steelyard|terminate called|Fatal Python error")


@dataclass
class Tally:
    """How many attempts had which outcome, and what every bad one was."""

    counts: Counter[str] = field(default_factory=Counter)
    bad: list[str] = field(default_factory=list)

    def add(self, outcome: str, description: str) -> None:
        self.counts[outcome] += 1
        if outcome in ("silent", "traceback", "hang"):
            self.bad.append(f"{outcome}: {description}")


@dataclass
class Result:
    """What one or several commands in a row said; the first that fails ends the row."""

    code: int
    out: str
    err: str
    timed_out: bool = False


def run(folder: Path, commands: Sequence[Sequence[str]], limit: float = LIMIT_SECONDS) -> Result:
    """Run commands of Steelyard, or `-c CODE`, in a folder."""
    out = err = ""
    for words in commands:
        program = words if words[0] == "-c" else ["-m", "steelyard", *words]
        process = preloaded.Popen(
            [sys.executable, "-P", *program], cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        )  # fmt: skip
        try:
            said, complained = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return Result(-1, out, err, timed_out=True)
        out, err = out + said, err + complained
        if process.returncode:
            return Result(process.returncode, out, err)
    return Result(0, out, err)


def judge(result: Result, behaviour: object, sound: object) -> str:
    """The outcome of a command, given what it led to and what it leads to on sound input."""
    if result.timed_out:
        return "hang"
    if result.code not in (0, 1, 2) or INTERNAL.search(result.err):
        return "traceback"
    if result.code:
        return "detected" if (result.err + result.out).strip() else "traceback"
    return "unchanged" if behaviour == sound else "silent"


def damaged(
    sound: Path, copy: Path, file: Path, content: bytes, commands: Sequence[Sequence[str]],
    behaviour: Callable[[Path, Result], object], expected: object,
) -> tuple[str, Result]:  # fmt: skip
    """The outcome of commands on a copy of a folder in which one file is damaged."""
    shutil.copytree(sound, copy, symlinks=True)
    try:
        (copy / file).write_bytes(content)
        result = run(copy, commands)
        seen = behaviour(copy, result) if result.code == 0 else None
        return judge(result, seen, expected), result
    finally:
        shutil.rmtree(copy)
