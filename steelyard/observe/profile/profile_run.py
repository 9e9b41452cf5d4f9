"""Starts a run for profiling: a few steps, without checkpoints."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from steelyard.core.console import console
from steelyard.core.errors import RuntimeFailure, UserError
from steelyard.core.recipe import Recipe
from steelyard.core.run import RECIPE, Run, for_training
from steelyard.launch import job_spec, spawn, submit
from steelyard.launch.submit import SubmitRequest
from steelyard.observe.profile import nsight_tools
from steelyard.observe.profile.summary import reported
from steelyard.observe.profile.trace_analysis import RankProfile
from steelyard.observe.profile.trace_cache import read


@dataclass(frozen=True)
class ProfiledRun:
    """A profiled run with the analysis of its traces."""

    run: Run
    profiles: list[RankProfile]
    problems: list[str]

    def as_result(self) -> dict[str, Any]:
        """The result as one JSON object."""
        return {
            "run": str(self.run.path),
            "traces": [str(path) for path in sorted((self.run.path / nsight_tools.PROFILE).glob("*-rank-*"))],
            "problems": self.problems,
            "ranks": [one.as_result() for one in self.profiles],
            "words": reported(self.profiles),
        }

    def as_text(self) -> str:
        """The summary as text."""
        lines = [*reported(self.profiles), *(f"not read: {problem}" for problem in self.problems)]
        return "\n".join([*lines, "", f"traces  {self.run.path / nsight_tools.PROFILE}"])


def asked_for(recipe: Recipe, tool: str, steps: list[int], ranks: list[int]) -> Recipe:
    """The recipe of a run that ends with the last profiled step and saves no checkpoint."""
    if steps != list(range(steps[0], steps[-1] + 1)):
        raise UserError("--steps: the steps of a profile must be consecutive", hint="use a range such as 10-12")
    settings = recipe.settings()
    settings["name"] = f"{recipe.name}-profile"
    settings["train"] = {key: value for key, value in settings["train"].items() if key not in ("tokens", "samples")}
    settings["train"]["steps"] = steps[-1]
    settings["optim"] = {"decay_steps": recipe.train.steps} | settings.get("optim", {})
    settings["log"] = settings.get("log", {}) | {
        "every": 1, "profile": [steps[0], steps[-1]], "profile_tool": tool, "profile_ranks": ranks,
        # From the step before, so that clocks are synchronized before the profiler starts.
        "timeline": [max(1, steps[0] - 1), steps[-1]] if tool in ("torch", "memory") else None,
    }  # fmt: skip
    settings["log"] = {key: value for key, value in settings["log"].items() if value is not None}
    settings["eval"] = settings.get("eval", {}) | {"every": 0, "batches": 1}
    settings["checkpoint"] = settings.get("checkpoint", {}) | {"every": 0, "at_end": False, "keep_best": False}
    return Recipe.model_validate(settings)


def prepare(recipe: Recipe, run: Path | None) -> Run:
    """Create a run folder with a folder for traces, so that a profiler can write before the run starts."""
    made = for_training(recipe, run, fresh=True)
    (made.path / nsight_tools.PROFILE).mkdir(exist_ok=True)
    return made


def refuse_unfit(request: SubmitRequest, ranks: list[int]) -> int:
    """Reject requests that cannot be started, before anything is written. Returns the number of ranks."""
    world = job_spec.world(submit.groups_of(request))
    absent = [rank for rank in ranks if rank >= world]
    if absent:
        raise UserError(f"--ranks: there is no rank {absent[0]}; the run has {world}, numbered from 0")
    return world


def here(run: Run, ranks: int) -> None:
    """Run on this machine, in the foreground."""
    command = [sys.executable, "-P", "-m", "steelyard", "train", str(run.path / RECIPE), "--run", str(run.path)]
    command += ["--quiet"] if console.quiet else []
    with _results_to_errors():
        code = spawn.run(command, ranks)
    _refuse_failed(code, run)


def elsewhere(request: SubmitRequest, run: Run) -> None:
    """Run with mpirun or on Slurm, and wait for the end."""
    result = submit.submit(replace(request, run=run.path))
    console.say(f"{run.path}: job {', '.join(result['jobs'])}, {result['state']}; waiting for its end")
    _refuse_failed(submit.wait(run.path), run)


@contextmanager
def _results_to_errors() -> Iterator[None]:
    """Redirect the standard output of processes started in the block to standard error."""
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)


def _refuse_failed(code: int, run: Run) -> None:
    if code:
        raise RuntimeFailure("the profiled run failed", hint=f"for details: steelyard watch {run.path}")


def seen(run: Run) -> ProfiledRun:
    """Read the traces of a run."""
    profiles, problems = read(run)
    if not profiles and not problems:
        raise UserError(
            f"{run.path} has no profile",
            hint="create one with steelyard profile RECIPE; on a cluster, wait until its job has ended",
        )
    return ProfiledRun(run, profiles, problems)
