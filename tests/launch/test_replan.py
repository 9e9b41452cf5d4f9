"""Plans for the nodes that an elastic run of two GPU types has left."""

import pytest

from steelyard.core.recipe import load_recipe
from steelyard.core.recipe.toml import leaves
from steelyard.launch import replan
from steelyard.launch.elastic_job import ElasticJob, Node

CLUSTER = {
    "nodes": [
        {"type": "big", "count": 2, "gpu": "a100-40", "gpus": 4},
        {"type": "small", "count": 2, "gpu": "a10", "gpus": 4},
    ],
    "links": [{"between": ["*", "*"], "GBps": 12.5, "latency_us": 5.0, "transport": "rdma"}],
}
GROUPS = [{"type": name, "nodes": 2, "ranks": 4, "cpus": 8} for name in ("big", "small")]
NODES = [Node("b1", "big"), Node("b2", "big"), Node("s1", "small"), Node("s2", "small")]
LAYOUT = ["parallel.pipeline=2", "parallel.data=8", "parallel.placement=['big:2', 'small:2']"]


def planned(recipe, *lost, min_nodes=1):
    job = ElasticJob("slurm", min_nodes, GROUPS, CLUSTER, [], [])
    return replan.plan(job, recipe, [node for node in NODES if node.name not in lost])


@pytest.fixture
def recipe():
    return load_recipe("gpt2-xl", [*LAYOUT, "train.global_batch=64", "train.micro_batch=2"])


def test_with_all_nodes_the_submitted_layout_is_used(recipe):
    plan = planned(recipe)
    assert [node.name for node in plan.nodes] == ["b1", "b2", "s1", "s2"]
    assert plan.recipe is recipe


@pytest.mark.parametrize(
    ("lost", "used"), [(("b2",), {"b1", "s1", "s2"}), (("b1", "b2"), {"s1", "s2"}), (("b1", "b2", "s1"), {"s2"})]
)
def test_layout_partition_and_micro_batch_are_chosen_for_the_nodes_that_remain(recipe, lost, used):
    plan = planned(recipe, *lost)
    assert {node.name for node in plan.nodes} == used
    assert plan.ranks == [4] * len(used)
    parallel = plan.recipe.parallel
    assert parallel.tensor * parallel.context * parallel.pipeline * parallel.data == sum(plan.ranks)
    assert [entry.partition(":")[0] for entry in parallel.placement] == list(
        dict.fromkeys(node.type for node in plan.nodes)
    )
    before, after = dict(leaves(recipe.settings())), dict(leaves(plan.recipe.settings()))
    changed = {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
    assert all(key.startswith("parallel.") or key == "train.micro_batch" for key in changed), changed


def test_the_larger_gpus_get_more_layers(recipe):
    parallel = planned(recipe, "b2").recipe.parallel
    assert parallel.placement == ["big:1", "small:2"]
    layers = [int(count) for count in str(parallel.partition).split("-")]
    by_stage = [sum(layers[stage :: parallel.pipeline]) for stage in range(parallel.pipeline)]
    assert sum(by_stage) == 48
    assert by_stage[0] > max(by_stage[1:])


def test_without_a_layout_that_fits_the_nearest_one_is_named():
    large = load_recipe("llama3.1-70b", ["train.global_batch=64"])
    why = planned(large, "b1", "b2")
    assert isinstance(why, str)
    assert why.startswith("no layout fits 2 small: ")
    assert "GiB too much" in why


def test_too_few_nodes_are_counted(recipe):
    assert planned(recipe, "b1", "b2", "s1", min_nodes=2) == "needs 2 nodes, 1 is alive"
