from functools import cache, partial
from itertools import product

import pytest

from steelyard.core.recipe import load_recipe
from steelyard.sizes.param_count import head_flops, layer_flops, parameters
from steelyard.sizes.stage_layers import partition_of, stage_parameters


def planned(name, pipeline, virtual=1, *overrides):
    schedule = "interleaved" if virtual > 1 else "1f1b"
    plan = [f"parallel.pipeline={pipeline}", f"parallel.virtual={virtual}", f"parallel.schedule={schedule}"]
    return load_recipe(name, [*plan, "parallel.sequence_parallel=false", *overrides])


def stage_flops(recipe, stage, layers):
    """FLOPs per token of a stage; looking up an embedding is one operation per hidden element and pass."""
    cost = layers * layer_flops(recipe.model, recipe.data.sequence_length)
    cost += 2 * recipe.model.hidden if stage == 0 else 0
    return cost + (head_flops(recipe.model) if stage == recipe.parallel.stages - 1 else 0)


def cost_of(recipe):
    """The cost of the busiest pipeline rank, as a function of the partition."""
    flops, pipeline = cache(partial(stage_flops, recipe)), recipe.parallel.pipeline

    def busiest(counts):
        stages = list(map(flops, range(len(counts)), counts))
        return max(sum(stages[rank::pipeline]) for rank in range(pipeline))

    return busiest


def evenly(layers, stages):
    return [layers // stages + (stage < layers % stages) for stage in range(stages)]


def test_the_recipes_own_partition_is_kept():
    recipe = load_recipe("gpt2-small", ["parallel.pipeline=4", "parallel.partition=0-6-6-0"])
    assert str(partition_of(recipe)) == "0-6-6-0"


@pytest.mark.parametrize("name", ["gpt2-small", "gpt2-xl", "llama3.2-1b", "llama3.1-70b", "quickstart"])
@pytest.mark.parametrize("pipeline", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("virtual", [1, 2])
def test_a_partition_holds_all_layers_and_is_never_worse_than_an_even_one(name, pipeline, virtual):
    recipe = planned(name, pipeline, virtual)
    partition = partition_of(recipe)
    assert partition.stages == pipeline * virtual
    assert partition.total == recipe.model.layers
    even = evenly(recipe.model.layers, partition.stages)
    busiest = cost_of(recipe)
    assert busiest(partition.counts) <= min(busiest(even), busiest(even[::-1]))


@pytest.mark.parametrize("layers", [1, 2, 5, 8])
@pytest.mark.parametrize("vocab", [128, 5_000, 50_257])
@pytest.mark.parametrize(("pipeline", "virtual"), [(2, 1), (3, 1), (4, 1), (2, 2), (2, 3)])
def test_no_other_partition_is_better(layers, vocab, pipeline, virtual):
    sizes = [f"model.layers={layers}", f"model.vocab={vocab}", "model.hidden=384"]
    recipe = planned("gpt2-small", pipeline, virtual, *sizes)
    stages = pipeline * virtual
    every = (counts for counts in product(range(layers + 1), repeat=stages) if sum(counts) == layers)
    busiest = cost_of(recipe)
    assert busiest(partition_of(recipe).counts) == min(map(busiest, every))


@pytest.mark.parametrize(
    ("pipeline", "written"), [(2, "41-39"), (4, "20-20-21-19"), (8, "10-10-10-10-10-10-11-9"), (1, "80")]
)
def test_the_head_of_a_70b_weighs_about_a_layer(pipeline, written):
    assert str(partition_of(planned("llama3.1-70b", pipeline))) == written


def test_a_big_head_leaves_the_last_stage_fewer_layers():
    assert str(partition_of(planned("gpt2-small", 4))) == "4-4-4-0"


def test_stages_of_one_rank_are_about_equal():
    counts = partition_of(planned("llama3.1-70b", 4, 2)).counts
    assert max(counts) - min(counts) <= 2
    assert all(9 <= count <= 11 for count in counts)


@pytest.mark.parametrize("name", ["gpt2-small", "llama3.2-1b", "llama3.1-8b"])
def test_stages_together_are_the_model_and_a_second_copy_of_a_tied_table(name):
    recipe = planned(name, 4, 1, "model.vocab_multiple=1")
    table = recipe.model.vocab * recipe.model.hidden
    stages = [stage_parameters(recipe, stage).total for stage in range(4)]
    assert sum(stages) == parameters(recipe.model).total + (table if recipe.model.tied else 0)
    assert stage_parameters(planned(name, 1, 1, "model.vocab_multiple=1"), 0).total == parameters(recipe.model).total


def test_tensor_ranks_share_all_but_norms_positions_and_late_biases():
    for name, whole in (("gpt2-small", 1024 * 768 + 12 * 6 * 768 + 2 * 768), ("qwen2-7b", 28 * 2 * 3584 + 3584)):
        recipe = planned(name, 1)
        split = stage_parameters(recipe, 0).total - whole
        assert stage_parameters(recipe, 0, tensor=4).total == split // 4 + whole


@pytest.mark.parametrize(("pipeline", "virtual"), [(1, 1), (3, 1), (5, 1), (2, 2), (4, 3)])
@pytest.mark.parametrize("layers", [1, 4, 13, 30])
def test_each_layer_goes_to_the_rank_and_the_stage_with_the_least_to_do(pipeline, virtual, layers):
    recipe = planned("quickstart", pipeline, virtual, f"model.layers={layers}")
    counts = [0] * recipe.parallel.stages
    for _ in range(layers):
        costs = [stage_flops(recipe, stage, count) for stage, count in enumerate(counts)]
        ranks = [sum(costs[rank::pipeline]) for rank in range(pipeline)]
        keys = [(ranks[stage % pipeline], cost, -stage) for stage, cost in enumerate(costs)]
        counts[-min(keys)[2]] += 1
    assert partition_of(recipe).counts == tuple(counts)
