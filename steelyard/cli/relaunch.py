"""Restarts a command as several ranks."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from steelyard.core.console import console
from steelyard.core.errors import UserError
from steelyard.core.host import require_linux
from steelyard.launch import spawn
from steelyard.parallel.world import detect

NprocOption = Annotated[int | None, typer.Option("--nproc", min=1, metavar="N", help="Run N ranks on this machine.")]


def launch(nproc: int) -> int:
    """Start the same command as `nproc` ranks; returns the exit code of the job."""
    require_linux(f"--nproc {nproc}", "remove it: one process works on this system")
    world = detect(os.environ)
    if world.size > 1:
        raise UserError(
            f"--nproc {nproc} starts ranks, and {world.launcher} has already started {world.size}",
            hint="remove --nproc, or start a single process",
        )
    console.let_others_print()
    return spawn.run([sys.executable, *_without(sys.orig_argv[1:], "--nproc")], nproc)


def _without(words: list[str], option: str) -> list[str]:
    others = [word for word in words if not word.startswith(f"{option}=")]
    return [word for before, word in zip(["", *others], others, strict=False) if option not in (before, word)]
