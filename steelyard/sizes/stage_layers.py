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
    LayerSize,
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
    ends = _embedding_flops(recipe), head_flops(recipe.model)
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


def _embedding_flops(recipe: Recipe) -> int:
    return 2 * recipe.model.hidden


def stage_flops(recipe: Recipe, stage: int, layers: int) -> int:
    """FLOPs per token of a stage with `layers` layers, including its embedding and head.

    The embedding lookup counts as one operation per hidden element, forward and backward. That is negligible, but it
    breaks a tie in favour of the stage without the embedding.
    """
    cost = layers * layer_flops(recipe.model, recipe.data.sequence_length)
    cost += _embedding_flops(recipe) if stage == 0 else 0
    cost += head_flops(recipe.model) if stage == recipe.parallel.stages - 1 else 0
    return cost


def stage_parameters(recipe: Recipe, stage: int, tensor: int = 1, expert: int = 1) -> Parameters:
    """Parameters of a stage on one of `tensor` x `expert` ranks, including padding of the vocabulary."""
    return stages_parameters(recipe, tensor, expert)[stage]


def stages_parameters(recipe: Recipe, tensor: int = 1, expert: int = 1) -> list[Parameters]:
    """Parameters of all stages. A tied head on another stage than the embedding is a second copy of the table."""
    sizes, partition = end_parameters(recipe.model, tensor, padded=True), partition_of(recipe)
    table = recipe.model.padded_vocab * recipe.model.hidden // tensor
    head = table if recipe.model.tied and partition.stages > 1 else sizes.head
    layers = layer_sizes(recipe.model, tensor, expert)
    stages = [sum_layers(tuple(_of_stage(layers, partition, stage))) for stage in range(partition.stages)]
    stages[0] = replace(stages[0], embedding=sizes.embedding)
    stages[-1] = replace(stages[-1], final_norm=sizes.final_norm, head=head)
    return stages


def _of_stage(layers: list[LayerSize], partition: Partition, stage: int) -> list[LayerSize]:
    """The layers of a stage.

    `planning.partition` tries counts that are not a partition of the model, to find how many layers a rank has memory
    for. All layers are the largest ones there.
    """
    if partition.total != len(layers):
        return [max(layers)] * partition.counts[stage]
    numbers = partition.layers_of(stage)
    return layers[numbers.start : numbers.stop]


def stages_layers(recipe: Recipe) -> list[range]:
    """The numbers of the layers of each stage; beyond those of the model if the counts are not a partition of it."""
    partition, layers = partition_of(recipe), recipe.model.layers
    if partition.total != layers:
        return [range(layers, layers + count) for count in partition.counts]
    return [partition.layers_of(stage) for stage in range(partition.stages)]
