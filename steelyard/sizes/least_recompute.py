"""`parallel.recompute = "auto"`: the least activation checkpointing that fits into the memory of a device."""

from __future__ import annotations

from collections.abc import Iterator

from steelyard.core.recipe import Recipe
from steelyard.sizes.memory import memory_of
from steelyard.sizes.stage_layers import partition_of


def with_least_recompute(recipe: Recipe, world: int, usable: int | None) -> Recipe:
    """Replace `auto` by the first setting whose peak is at most `usable` bytes on every rank.

    If none is, by `full`; if the memory is not known (None), by `none`. Other settings are left.
    """
    if recipe.parallel.recompute != "auto":
        return recipe
    tried = recipe
    for recompute in _settings(recipe):
        tried = recipe.model_copy(update={"parallel": recipe.parallel.model_copy(update={"recompute": recompute})})
        if usable is None or max(memory.total for memory in memory_of(tried, world)) <= usable:
            break
    return tried


def _settings(recipe: Recipe) -> Iterator[str | int]:
    """Settings in the order of their cost. Selective checkpointing repeats no matrix product."""
    yield "none"
    yield "selective"
    yield from range(1, max(partition_of(recipe).counts))
    yield "full"
