"""A point of the space as a runnable trial: a recipe, or the arguments of a command."""

from __future__ import annotations

import functools
import json
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from steelyard.core import files
from steelyard.core.errors import UserError
from steelyard.core.recipe import Recipe, load_recipe, to_toml
from steelyard.planning import cluster as clusters
from steelyard.planning.cluster import Cluster
from steelyard.planning.layout import placement_for
from steelyard.tune import command as commands
from steelyard.tune.search_space import Point
from steelyard.tune.spec import Tune
from steelyard.tune.submitted_trial import abandon
from steelyard.tune.trial import RUN

RECIPE = "recipe.toml"
RECORDS = 20  # approximate number of records in metrics.jsonl per trial: enough for a median, at negligible cost


def recipe_at(tune: Tune, point: Point, is_trial: bool) -> Recipe:
    """The recipe with a point's settings; for a trial, shortened and without checkpoints and reports.

    If jobs run on a cluster with several types of nodes and the recipe has no placement, one is added.
    """
    overrides = [*tune.overrides, *(f"{key}={_toml(value)}" for key, value in point.items())]
    recipe = load_recipe(str(tune.recipe), overrides, _completion(tune, overrides, is_trial), tune.override_places)
    cluster = _cluster(tune.cluster) if tune.cluster is not None and tune.launch.on is not None else None
    if cluster is None or len(cluster.nodes) == 1 or recipe.parallel.placement:
        return recipe
    placement = placement_for(tune.nproc or recipe.parallel.least_world, cluster)
    return recipe.model_copy(update={"parallel": recipe.parallel.model_copy(update={"placement": placement})})


@functools.cache
def _cluster(path: str) -> Cluster:
    """The cluster file, cached: recipes are built for hundreds of points."""
    return clusters.load(path)


def refuse_recipe(tune: Tune) -> None:
    """Reject a recipe that cannot be tuned, before anything starts."""
    recipe = recipe_at(tune, {}, is_trial=True)
    if recipe.finetune is not None:
        raise UserError(
            f"{tune.recipe} is a fine-tuning recipe, which trials cannot run",
            hint='tune the command instead: command = "steelyard sft ... --run {folder}/run"',
        )


def prepare(tune: Tune, point: Point, folder: Path, number: int) -> list[str]:
    """Create a trial's folder, and return its command."""
    abandon(folder / RUN)
    shutil.rmtree(folder, ignore_errors=True)  # Left by a study of the same name whose database was deleted.
    folder.mkdir(parents=True)
    if tune.command is not None:
        values = point | {"trial": number, "folder": str(folder)}
        return commands.filled(commands.words(tune.command), values)
    recipe = recipe_at(tune, point, is_trial=True)
    files.write_text(folder / RECIPE, to_toml(recipe.settings()))
    ranks = ["--nproc", str(tune.nproc)] if (tune.nproc or 1) > 1 else []
    return commands.steelyard("train", folder / RECIPE, "--run", folder / RUN, *ranks)


def written(tune: Tune, point: Point) -> str:
    """The settings of a point as a recipe file, or as a command."""
    if tune.command is not None:
        named = {"trial": "best", "folder": "best"}
        return shlex.join(commands.filled(commands.words(tune.command), point | named)) + "\n"
    settings = recipe_at(tune, point, is_trial=False).settings()
    if "tokens" in settings["train"] or "samples" in settings["train"]:
        settings["train"].pop("steps", None)
    return to_toml(settings)


def _completion(tune: Tune, overrides: list[str], is_trial: bool) -> Callable[[Any], None]:
    """Changes for a trial's recipe: fewer steps, no checkpoint, no report, and dropped keys."""
    given = {override.partition("=")[0].strip() for override in overrides}

    def complete(values: Any) -> None:
        for key in tune.drop:
            section, _, name = key.rpartition(".")
            if key not in given:
                values.get(section, {}).pop(name, None)
        if not is_trial:
            return
        train, log = values.setdefault("train", {}), values.setdefault("log", {})
        if tune.trial.steps is not None and isinstance(train, dict):
            for length in ("samples", "tokens", "max_hours"):
                train.pop(length, None)
            train["steps"] = tune.trial.steps
        if isinstance(log, dict):
            log.pop("wandb", None)
            log.pop("on_verdict", None)
            log |= {"report": False, "tensorboard": False}
            steps = train.get("steps") if isinstance(train, dict) else None
            if "log.every" not in given and isinstance(steps, int):
                log["every"] = max(1, steps // RECORDS)
        checkpoint = values.setdefault("checkpoint", {})
        if isinstance(checkpoint, dict):
            checkpoint |= {"every": 0, "at_end": False, "keep_best": False}

    return complete


def _toml(value: Any) -> str:
    """A choice as the value of an override. A list is a string in the tune file, since Optuna takes no lists."""
    is_list = isinstance(value, str) and value.startswith("[")
    return str(value) if is_list else json.dumps(value, ensure_ascii=False)
