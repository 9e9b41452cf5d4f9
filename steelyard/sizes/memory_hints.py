"""Single changes to a recipe that make it fit in memory, each evaluated with the memory model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError

from steelyard.core.errors import UserError
from steelyard.core.recipe import Recipe
from steelyard.sizes.memory import memory_of

AT_MOST = 4


def remedies(recipe: Recipe, world: int, usable: int) -> list[tuple[str, int]]:
    """Changes that reduce the peak to `usable` bytes, the least costly first; if none does, the most effective.

    Each comes with the peak bytes of the fullest rank.
    """
    now = max(memory.total for memory in memory_of(recipe, world))
    helpful = [(name, size) for name, size in _tried(recipe, world) if size < now]
    enough = [(name, size) for name, size in helpful if size <= usable]
    return (enough or sorted(helpful, key=lambda item: item[1]))[:AT_MOST]


def _tried(recipe: Recipe, world: int) -> Iterator[tuple[str, int]]:
    for section, key, value in _changes(recipe):
        settings = recipe.settings()
        settings.setdefault(section, {})[key] = value
        written = str(value).lower() if isinstance(value, bool) else value
        try:
            changed = Recipe.model_validate(settings)
            yield f"{section}.{key}={written}", max(memory.total for memory in memory_of(changed, world))
        except (ValidationError, UserError):
            continue
    if recipe.parallel.data is None and recipe.parallel.zero:
        try:
            yield f"--world {2 * world}", max(memory.total for memory in memory_of(recipe, 2 * world))
        except UserError:
            return


def _changes(recipe: Recipe) -> Iterator[tuple[str, str, Any]]:
    """Single settings that may save memory, ordered by their cost in speed."""
    parallel = recipe.parallel
    tune = recipe.finetune
    if tune is not None and tune.adapter is not None and tune.base_precision is None:
        yield "finetune", "base_precision", "nf4"
    if parallel.tensor > 1 and not parallel.sequence_parallel:
        yield "parallel", "sequence_parallel", True
    if parallel.schedule != "1f1b" and parallel.virtual == 1:
        yield "parallel", "schedule", "1f1b"
    for zero in range(parallel.zero + 1, 4):
        yield "parallel", "zero", zero
    if recipe.train.micro_batch > 1:
        yield "train", "micro_batch", recipe.train.micro_batch // 2
    if recipe.model.blocks.has_experts:
        yield "parallel", "expert", 2 * parallel.expert
    if parallel.stages > 1:
        yield "train", "micro_batch", 2 * recipe.train.micro_batch
    if parallel.recompute == "none":
        yield "parallel", "recompute", "selective"
    if parallel.recompute != "full":
        yield "parallel", "recompute", "full"
    if not recipe.optim.offload:
        yield "optim", "offload", True
