"""Starting a run that is only there to be looked at."""

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
from steelyard.observe.profile.trace_analysis import Look
from steelyard.observe.profile.trace_cache import read


@dataclass(frozen=True)
class ProfiledRun:
    """What came of it."""

    run: Run
    looks: list[Look]
    problems: list[str]

    def as_result(self) -> dict[str, Any]:
        """As one JSON object."""
        return {
            "run": str(self.run.path),
            "traces": [str(path) for path in sorted((self.run.path / nsight_tools.PROFILE).glob("*-rank-*"))],
            "problems": self.problems,
            "ranks": [one.as_result() for one in self.looks],
            "words": reported(self.looks),
        }

    def as_text(self) -> str:
        """For people."""
        lines = [*reported(self.looks), *(f"not read: {problem}" for problem in self.problems)]
        return "\n".join([*lines, "", f"traces  {self.run.path / nsight_tools.PROFILE}"])


def asked_for(recipe: Recipe, tool: str, steps: list[int], ranks: list[int]) -> Recipe:
    """The recipe of a run that ends with the last step looked at, and saves nothing."""
    if steps != list(range(steps[0], steps[-1] + 1)):
        raise UserError("--steps: a profile is of steps in a row", hint="write them like 10-12")
    settings = recipe.settings()
    settings["name"] = f"{recipe.name}-profile"
    settings["train"] = {key: value for key, value in settings["train"].items() if key not in ("tokens", "samples")}
    settings["train"]["steps"] = steps[-1]
    settings["optim"] = {"decay_steps": recipe.train.steps} | settings.get("optim", {})
    settings["log"] = settings.get("log", {}) | {
        "every": 1, "profile": [steps[0], steps[-1]], "profile_tool": tool, "profile_ranks": ranks,
        # From the step before on, so that clocks are compared before the profiler looks.
        "timeline": [max(1, steps[0] - 1), steps[-1]] if tool in ("torch", "memory") else None,
    }  # fmt: skip
    settings["log"] = {key: value for key, value in settings["log"].items() if value is not None}
    settings["eval"] = settings.get("eval", {}) | {"every": 0, "batches": 1}
    settings["checkpoint"] = settings.get("checkpoint", {}) | {"every": 0, "at_end": False, "keep_best": False}
    return Recipe.model_validate(settings)


def prepare(recipe: Recipe, run: Path | None) -> Run:
    """A new run folder with a place for traces, where a profiler can write before the run has begun."""
    made = for_training(recipe, run, fresh=True)
    (made.path / nsight_tools.PROFILE).mkdir(exist_ok=True)
    return made


def refuse_unfit(request: SubmitRequest, ranks: list[int]) -> int:
    """Refuse what cannot be started, before anything is written; returns how many ranks there will be."""
    world = job_spec.world(submit.groups_of(request))
    absent = [rank for rank in ranks if rank >= world]
    if absent:
        raise UserError(f"--ranks: there is no rank {absent[0]}; the run has {world}, from 0 on")
    return world


def here(run: Run, ranks: int) -> None:
    """Run it on this machine, in sight."""
    command = [sys.executable, "-P", "-m", "steelyard", "train", str(run.path / RECIPE), "--run", str(run.path)]
    command += ["--quiet"] if console.quiet else []
    with _results_to_errors():
        code = spawn.run(command, ranks)
    _refuse_failed(code, run)


def elsewhere(request: SubmitRequest, run: Run) -> None:
    """Run it over mpirun or on Slurm, and wait for its end."""
    result = submit.submit(replace(request, run=run.path))
    console.say(f"{run.path}: job {', '.join(result['jobs'])}, {result['state']}; waiting for its end")
    _refuse_failed(submit.wait(run.path), run)


@contextmanager
def _results_to_errors() -> Iterator[None]:
    """Have what processes started in the block print as results go where messages go: the result is not theirs."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _refuse_failed(code: int, run: Run) -> None:
    if code:
        raise RuntimeFailure("the run that was to be profiled failed", hint=f"steelyard watch {run.path} tells more")


def seen(run: Run) -> ProfiledRun:
    """Read the traces of a run."""
    looks, problems = read(run)
    if not looks and not problems:
        raise UserError(
            f"{run.path} has no profile",
            hint="steelyard profile RECIPE makes one; on a cluster wait until its job is over",
        )
    return ProfiledRun(run, looks, problems)
