"""The default number of layers per pipeline stage, and the parameters of each stage.

All layers of a model count with their mean cost, so a partition is a number of layers per stage, and assigning one
layer at a time to the stage with the least work is exact. The work of ranks is balanced first, because the slowest rank
determines the step time, then the work of the stages of each rank, because they alternate with those of other ranks.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from heapq import heapify, heapreplace

from steelyard.core.recipe import Recipe
from steelyard.core.recipe.parallel_section import Partition
from steelyard.sizes.param_count import (
    Parameters,
    end_parameters,
    head_flops,
    layer_flops,
    layer_sizes,
    sum_layers,
)


def partition_of(recipe: Recipe) -> Partition:
    """The partition in the recipe, or layers balanced by FLOPs.

    On a tie the later stage gets the layer, because earlier stages keep more micro-batches in memory.
    """
    parallel = recipe.parallel
    if parallel.partition is not None:
        return parallel.partition
    layer = layer_flops(recipe.model, recipe.data.sequence_length)
    # Looking up an embedding costs next to nothing, but breaks a tie in favour of a stage without it.
    ends = 2 * recipe.model.hidden, head_flops(recipe.model)
    return _balanced(recipe.model.layers, parallel.pipeline, parallel.stages, layer, ends)


@lru_cache(maxsize=128)
def _balanced(layers: int, pipeline: int, stages: int, layer: int, ends: tuple[int, int]) -> Partition:
    """Assign each layer to the rank with the least work, and there to the stage with the least work."""
    counts, costs = [0] * stages, [0] * stages
    costs[0] += ends[0]
    costs[-1] += ends[1]

    def key(rank: int) -> tuple[int, int, int]:
        stage = min(range(rank, stages, pipeline), key=lambda stage: (costs[stage], -stage))
        return sum(costs[rank::pipeline]), costs[stage], -stage

    waiting = [key(rank) for rank in range(pipeline)]
    heapify(waiting)
    for _ in range(layers):
        chosen = -waiting[0][2]
        counts[chosen] += 1
        costs[chosen] += layer
        heapreplace(waiting, key(chosen % pipeline))
    return Partition(tuple(counts))


def stage_parameters(recipe: Recipe, stage: int, tensor: int = 1, expert: int = 1) -> Parameters:
    """Parameters of a stage on one of `tensor` x `expert` ranks, including padding of the vocabulary."""
    partition = partition_of(recipe)
    return StageSizes(recipe, tensor, expert).of(stage, partition.stages, layers_of(recipe, partition, stage))


def layers_of(recipe: Recipe, partition: Partition, stage: int) -> range:
    """The numbers of the layers of a stage.

    `planning.partition` tries counts that are not a partition of the model, to find how many layers a rank has memory
    for. These layers are beyond those of the model, and are as large as its largest.
    """
    layers = recipe.model.layers
    if partition.total != layers:
        return range(layers, layers + partition.counts[stage])
    return partition.layers_of(stage)


class StageSizes:
    """The parameters of a stage on one of `tensor` x `expert` ranks as a function of its layers."""

    def __init__(self, recipe: Recipe, tensor: int = 1, expert: int = 1) -> None:
        model = recipe.model
        self.layers = layer_sizes(model, tensor, expert)
        self.largest = max(self.layers)
        self.is_uniform = len(set(self.layers)) == 1
        self.ends = end_parameters(model, tensor, padded=True)
        self.copy = model.padded_vocab * model.hidden // tensor if model.tied else 0

    def of(self, stage: int, stages: int, layers: range) -> Parameters:
        """The parameters of a stage. A tied head on another stage than the embedding is a second copy of the table."""
        if layers.stop > len(self.layers):
            found = sum_layers((self.largest,) * len(layers))
        else:
            found = sum_layers(tuple(self.layers[layers.start : layers.stop]))
        if stage == 0:
            found = replace(found, embedding=self.ends.embedding)
        if stage == stages - 1:
            head = self.copy if self.copy and stages > 1 else self.ends.head
            found = replace(found, final_norm=self.ends.final_norm, head=head)
        return found
