"""Nsight's programs, which look at a rank from outside: where they are, and how a rank starts itself under one.

A rank that finds `log.profile_tool = "nsys"` or `"ncu"` in its recipe replaces itself by that program with the same
command inside, before torch is imported. So it makes no difference who started the rank, and ranks that are not looked
at pay nothing.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from steelyard.core.errors import UserError
from steelyard.core.recipe import Recipe

PROFILE = "profile"
UNDER = "STEELYARD_PROFILED_BY"  # Set by a rank for itself, so that it does not start under a profiler twice.
OUTSIDE = ("nsys", "ncu")
SUFFIXES = {"torch": ".json.gz", "memory": ".json.gz", "nsys": ".nsys-rep", "ncu": ".ncu-rep"}
ABSENT = {
    "nsys": "it comes with CUDA's toolkit and as NVIDIA Nsight Systems (package nsight-systems); often it is "
    "installed and not in PATH: look for /usr/local/cuda/bin/nsys or /opt/nvidia/nsight-systems/*/bin/nsys, or load "
    "the site's cuda module. --tool torch needs neither",
    "ncu": "it comes with CUDA's toolkit as NVIDIA Nsight Compute; often it is installed and not in PATH: look for "
    "/usr/local/cuda/bin/ncu or /opt/nvidia/nsight-compute/*/ncu, or load the site's cuda module. --tool torch needs "
    "neither",
}


def find(tool: str) -> str:
    """The program, or the reason why it cannot be used."""
    found = shutil.which(tool)
    if found is None:
        raise UserError(f"{tool} is not installed here, or not in PATH", hint=ABSENT[tool])
    return found


def trace(folder: Path, tool: str, rank: int) -> Path:
    """Where a rank's trace lies."""
    return folder / f"{tool}-rank-{rank:05d}{SUFFIXES[tool]}"


def line(tool: str, program: str, path: Path, is_cpu: bool, command: Sequence[str]) -> list[str]:
    """The command under a profiler.

    On a GPU it looks only between cudaProfilerStart and Stop, which stand around the steps; a processor has no such
    calls, and nsys then watches the system calls of the whole run.
    """
    if tool == "nsys":
        what = ["-t", "osrt", "--cpuctxsw=none", "--osrt-threshold=10000"] if is_cpu else [
            "-t", "nvtx,cuda", "--capture-range=cudaProfilerApi", "--capture-range-end=stop",
        ]  # fmt: skip
        stem = str(path).removesuffix(SUFFIXES[tool])
        return [program, "profile", "-s", "none", *what, "--force-overwrite=true", "-o", stem, *command]
    # Clocks stay as the run has them: ncu would fix them low, and is often not allowed to.
    looking = ["--profile-from-start", "off", "--clock-control", "none", "--target-processes", "all", "--nvtx", "-f"]
    return [program, *looking, "-o", str(path).removesuffix(SUFFIXES[tool]), *command]


def go_under(recipe: Recipe, run: Path | None, rank: int) -> None:
    """Start this very command again under the profiler that the recipe asks for, if it does and this rank is meant."""
    log, tool = recipe.log, recipe.log.profile_tool
    if tool not in OUTSIDE or os.environ.get(UNDER) == tool or (log.profile_ranks and rank not in log.profile_ranks):
        return
    folder = None if run is None else run / PROFILE
    if folder is None or not folder.is_dir():
        raise UserError(
            f"log.profile_tool = {tool} is for runs that steelyard profile starts",
            where=recipe.where("log.profile_tool"),
            hint=f"steelyard profile RECIPE --tool {tool}; or leave the key out and start {tool} yourself",
        )
    words = line(tool, find(tool), trace(folder.resolve(), tool, rank), recipe.train.device == "cpu",
                 [sys.executable, *sys.orig_argv[1:]])  # fmt: skip
    os.execve(words[0], words, os.environ | {UNDER: tool})  # noqa: S606
