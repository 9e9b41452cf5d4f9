"""The Nsight tools nsys and ncu: finds them, and restarts a rank under one.

A rank with `log.profile_tool = "nsys"` or `"ncu"` in its recipe replaces itself (execve) by the tool with the same
command as argument, before torch is imported. This works with every launcher, and ranks that are not profiled have no
overhead.
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
UNDER = "STEELYARD_PROFILED_BY"  # Set by a rank for itself, so that it does not restart under the profiler twice.
OUTSIDE = ("nsys", "ncu")
SUFFIXES = {"torch": ".json.gz", "memory": ".json.gz", "nsys": ".nsys-rep", "ncu": ".ncu-rep"}
ABSENT = {
    "nsys": "it is part of the CUDA toolkit and of NVIDIA Nsight Systems (package nsight-systems). It is often "
    "installed but not in PATH: check /usr/local/cuda/bin/nsys and /opt/nvidia/nsight-systems/*/bin/nsys, or load "
    "the site's cuda module. --tool torch needs neither",
    "ncu": "it is part of the CUDA toolkit, as NVIDIA Nsight Compute. It is often installed but not in PATH: check "
    "/usr/local/cuda/bin/ncu and /opt/nvidia/nsight-compute/*/ncu, or load the site's cuda module. --tool torch needs "
    "neither",
}


def find(tool: str) -> str:
    """The path of a tool; raises if it is not in PATH."""
    program = shutil.which(tool)
    if program is None:
        raise UserError(f"{tool} is not installed here, or not in PATH", hint=ABSENT[tool])
    return program


def trace(folder: Path, tool: str, rank: int) -> Path:
    """The path of a rank's trace."""
    return folder / f"{tool}-rank-{rank:05d}{SUFFIXES[tool]}"


def line(tool: str, program: str, path: Path, is_cpu: bool, command: Sequence[str]) -> list[str]:
    """The command under a profiler.

    On a GPU it records only between cudaProfilerStart and Stop, which enclose the profiled steps. A CPU has no such
    calls, so nsys records the system calls of the whole run.
    """
    if tool == "nsys":
        what = ["-t", "osrt", "--cpuctxsw=none", "--osrt-threshold=10000"] if is_cpu else [
            "-t", "nvtx,cuda", "--capture-range=cudaProfilerApi", "--capture-range-end=stop",
        ]  # fmt: skip
        stem = str(path).removesuffix(SUFFIXES[tool])
        return [program, "profile", "-s", "none", *what, "--force-overwrite=true", "-o", stem, *command]
    # Do not control clocks: ncu would lock them at a low rate, and often lacks the permission.
    options = ["--profile-from-start", "off", "--clock-control", "none", "--target-processes", "all", "--nvtx", "-f"]
    return [program, *options, "-o", str(path).removesuffix(SUFFIXES[tool]), *command]


def go_under(recipe: Recipe, run: Path | None, rank: int) -> None:
    """Restart this command under the profiler of the recipe, if it has one and this rank is to be profiled."""
    log, tool = recipe.log, recipe.log.profile_tool
    if tool not in OUTSIDE or os.environ.get(UNDER) == tool or (log.profile_ranks and rank not in log.profile_ranks):
        return
    folder = None if run is None else run / PROFILE
    if folder is None or not folder.is_dir():
        raise UserError(
            f"log.profile_tool = {tool} works only in runs that steelyard profile starts",
            where=recipe.where("log.profile_tool"),
            hint=f"use steelyard profile RECIPE --tool {tool}, or remove the key and start {tool} yourself",
        )
    words = line(tool, find(tool), trace(folder.resolve(), tool, rank), recipe.train.device == "cpu",
                 [sys.executable, *sys.orig_argv[1:]])  # fmt: skip
    os.execve(words[0], words, os.environ | {UNDER: tool})  # noqa: S606
