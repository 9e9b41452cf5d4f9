"""Host memory of memory checkpoints (`checkpoint.memory_every`). They need no device memory."""

from __future__ import annotations

from steelyard.core.recipe import Recipe

KEPT = 2  # in the tmpfs of a node
PINNED = 1


def memory_copies(recipe: Recipe, state: int, columns: int, shards: int) -> int:
    """Bytes per rank of host memory, for a rank whose weights and optimizer state in a checkpoint have this size.

    All of it is copied to pinned memory. Ranks that hold the same shard, of which there are `columns / shards`, write
    it once. With more than one rank a peer's file of the same size is counted, as on several nodes.
    """
    if not recipe.checkpoint.memory_every:
        return 0
    has_peer = columns * recipe.parallel.tensor * recipe.parallel.pipeline > 1
    return PINNED * state + KEPT * -(-state * shards // columns) * (2 if has_peer else 1)
