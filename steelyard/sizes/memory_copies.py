"""Memory of memory checkpoints (`checkpoint.memory_every`), for a rank with `state` bytes in a checkpoint."""

from __future__ import annotations

from steelyard.core.recipe import Recipe
from steelyard.sizes.gpu_catalogue import GIB

KEPT = 2  # in the tmpfs of a node
PINNED = 1


def on_host(recipe: Recipe, state: int, columns: int, shards: int) -> int:
    """Bytes of host memory: all of the state in pinned memory, and files in tmpfs.

    Ranks that hold the same shard, of which there are `columns / shards`, write it once. With more than one rank a
    peer's file of the same size is counted, as on several nodes.
    """
    if not recipe.checkpoint.memory_every:
        return 0
    has_peer = columns * recipe.parallel.tensor * recipe.parallel.pipeline > 1
    return PINNED * state + KEPT * -(-state * shards // columns) * (2 if has_peer else 1)


def on_device(recipe: Recipe, state: int) -> int:
    """Bytes of device memory: clones that wait for their copy (`checkpoint.memory_device_gib`)."""
    return min(state, int(recipe.checkpoint.memory_device_gib * GIB)) if recipe.checkpoint.memory_every else 0
