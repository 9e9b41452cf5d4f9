"""The default search space of a recipe: settings that change speed or memory but not the training result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from steelyard.core.recipe import Recipe, load_recipe
from steelyard.planning.layout_space import SearchLimits, divisors, micro_batches
from steelyard.tune.spec import Tune, checked

STEPS, WARM_UP = 20, 5
# Keys that would contradict other layouts.
DEGREES = ("parallel.tensor", "parallel.pipeline", "parallel.zero", "parallel.sequence_parallel", "parallel.schedule")
LAYOUT = ("parallel.data", "parallel.partition", "parallel.placement", "parallel.virtual", "parallel.replicate")


def tune_for(source: str, overrides: Sequence[str], nproc: int | None, changes: dict[str, Any]) -> Tune:
    """A tune file for a recipe: layout on `nproc` ranks, micro-batch and recomputation, for tokens per second.

    If jobs are submitted and `nproc` is not given, it is the number of ranks that the recipe's layout needs.
    """
    recipe = load_recipe(source, overrides)
    nproc = nproc or (recipe.parallel.least_world if changes.get("launch.on") else 1)
    given = {override.partition("=")[0].strip() for override in overrides}
    space, constraints = _space(recipe, nproc, given)
    values: dict[str, Any] = {
        "name": recipe.name,
        "recipe": source,
        "overrides": list(overrides),
        "nproc": nproc,
        "drop": list(LAYOUT),
        "space": {name: {"choice": choices} for name, choices in space.items()},
        "constraints": constraints,
        "objectives": [{"metric": "tokens_per_second", "skip": min(WARM_UP, changes.get("trial.steps", STEPS) // 4)}],
        "trial": {"steps": STEPS},
        "budget": {"trials": 30},
    }
    return checked(values, {}, source, changes)


def _space(recipe: Recipe, nproc: int, given: set[str]) -> tuple[dict[str, list[Any]], list[str]]:
    degrees = list(divisors(nproc))
    tensors = [degree for degree in degrees if _divides(recipe, degree)]
    pipelines = [degree for degree in degrees if degree <= recipe.model.layers + 2]
    space: dict[str, list[Any]] = {
        "train.micro_batch": micro_batches(recipe, SearchLimits()),
        "parallel.recompute": ["none", "selective", "full"],
        "parallel.tensor": tensors,
        "parallel.pipeline": pipelines,
        "parallel.zero": [0, 1, 2, 3] if nproc > 1 else [0],
        "parallel.sequence_parallel": [False, True] if len(tensors) > 1 else [False],
        "parallel.schedule": ["1f1b", "gpipe", "zero-bubble"] if len(pipelines) > 1 else ["1f1b"],
    }
    written = {name: getattr(getattr(recipe, name.split(".")[0]), name.split(".")[1]) for name in space}
    space |= {name: [written[name]] for name in space if name in given}
    # A single value is kept only if the recipe, written for another number of ranks, has a different one.
    space = {
        name: choices
        for name, choices in space.items()
        if len(choices) > 1 or name in given or (name in DEGREES and choices != [written[name]])
    }
    searched = space.keys()
    model_ranks: list[str] = [name for name in DEGREES[:2] if name in searched]
    rules: dict[str, list[str]] = {
        f"world % ({' * '.join(model_ranks)}) == 0": model_ranks,
        f"parallel.zero == 0 or world > {' * '.join(model_ranks)}": ["parallel.zero", *model_ranks[:1]],
        "parallel.tensor > 1 or not parallel.sequence_parallel": ["parallel.tensor", "parallel.sequence_parallel"],
        "parallel.pipeline > 1 or parallel.schedule == '1f1b'": ["parallel.pipeline", "parallel.schedule"],
    }
    return space, [rule for rule, names in rules.items() if names and searched >= set(names)]


def _divides(recipe: Recipe, degree: int) -> bool:
    model = recipe.model
    sizes = (model.heads, getattr(model, "kv_heads", model.heads), model.ffn, model.padded_vocab)
    return all(size % degree == 0 for size in sizes)
