"""Loads the weights of a new run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from steelyard import checkpoint
from steelyard.checkpoint import TensorShard, formats
from steelyard.parallel.world import World, gather_errors, run_on_rank0

if TYPE_CHECKING:
    from steelyard.core.recipe import Recipe
    from steelyard.training.engine import Engine


def from_recipe(engine: Engine, world: World) -> str:
    """Load the checkpoint of `train.init_from`, if set; returns the origin of the weights as text."""
    origin = engine.recipe.train.init_from
    if origin is None:
        return "new run"
    load(origin, engine.state_shards(for_saving=False, with_optimizer=False), engine.recipe, world)
    return f"new run from the weights of {origin}"


def load(origin: str, pieces: dict[str, TensorShard], recipe: Recipe, world: World) -> None:
    """Load shards of the model from a checkpoint of any format."""
    if formats.is_own(origin):  # Rank 0 verifies checksums, and each rank reads only what it needs.
        saved = run_on_rank0(world, lambda: checkpoint.source(origin))
        with gather_errors(world):
            checkpoint.load(saved, pieces)
    else:
        with gather_errors(world):
            formats.load_shards(formats.open_source(origin), pieces, recipe.model)
