"""The memory of pipeline ranks as a function of the partition, for a search that tries thousands of partitions.

Ranks with the same layers and the same micro-batches in flight need the same memory, which is computed once.
"""

from __future__ import annotations

from collections.abc import Iterable

from steelyard.core.recipe import Recipe
from steelyard.core.recipe.parallel_section import Partition
from steelyard.sizes.memory import Memory, RankPeak, SharedSizes
from steelyard.sizes.stage_layers import StageSizes, layers_of


class RankMemory:
    """The memory of the pipeline ranks of a recipe, whatever its own partition is.

    `stages` are known if another recipe has the same model and degrees of tensor and expert parallelism.
    """

    def __init__(self, recipe: Recipe, world: int, stages: StageSizes | None = None) -> None:
        self.recipe, self.shared = recipe, SharedSizes(recipe, world, stages)
        self.is_uniform = self.shared.stages.is_uniform and self.shared.per_token.is_uniform
        self._kinds: dict[int, tuple[object, ...]] = {}
        self._known: dict[tuple[object, ...], Memory] = {}

    def of(self, partition: Partition, ranks: Iterable[int]) -> list[Memory]:
        """The peak memory of some pipeline ranks."""
        return [self._of_rank(partition, rank) for rank in ranks]

    def _of_rank(self, partition: Partition, rank: int) -> Memory:
        parallel = self.recipe.parallel
        layers: tuple[object, ...] = partition.counts[rank :: parallel.pipeline]
        if not self.is_uniform:
            stages = range(rank, parallel.stages, parallel.pipeline)
            layers = tuple(layers_of(self.recipe, partition, stage) for stage in stages)
        if rank not in self._kinds:
            self._kinds[rank] = (rank == 0, rank == parallel.pipeline - 1, self.shared.states(rank))
        key = (layers, self._kinds[rank])
        if key not in self._known:
            self._known[key] = RankPeak(self.shared, partition, rank).memory()
        return self._known[key]
