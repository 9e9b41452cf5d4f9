"""Plans of models with experts."""

import pytest

from steelyard.core.errors import UserError
from steelyard.core.recipe import Recipe
from steelyard.planning import communication, layout_space, memory_fit
from steelyard.planning.cluster import Cluster
from steelyard.planning.communication import BASE_LATENCY, REACHED
from steelyard.planning.layout import Seats
from steelyard.planning.layout_space import SearchLimits
from steelyard.planning.plan_report import shown
from steelyard.planning.predict import Predictor
from steelyard.planning.search import given as predicted
from steelyard.planning.search import search
from steelyard.planning.software import MEGATRON
from steelyard.sizes.rank_check import data_ranks
from tests.planning.machines import cluster, gpt, layout

LIMITS = SearchLimits(micro_batch=2, virtual=1, schedules=("1f1b",), subsets=False, contexts=(1,), tensor=2)


def moe(batch=16, layers=4, parallel=None, **more) -> Recipe:
    model = {
        "family": "mixtral", "layers": layers, "hidden": 1024, "heads": 16, "ffn": 2048, "vocab": 32000, "experts": 8,
    } | more  # fmt: skip
    train = {"global_batch": batch, "micro_batch": 1, "precision": "bf16"}
    values = {"name": "moe", "model": model, "data": {"sequence_length": 1024}, "train": train}
    return Recipe.model_validate(values | {"parallel": parallel or {}})


def test_an_all_to_all_takes_the_link_inside_a_node_and_the_shared_network_between_nodes():
    machines = cluster(("a100-80", 2, 4), network=12.5)
    seats = Seats(machines, (("a100-80", 2),)).of(0, 8)
    near, far = (communication.all_to_all(machines, seats, 1, size) for size in (4, 8))
    inside = machines.inside(machines.nodes[0])
    assert near.seconds(1e9) == pytest.approx(BASE_LATENCY + inside.latency + 0.75e9 / (300e9 * REACHED["nvlink"]))
    # Half of the bytes of each of four ranks leave the node.
    assert far.seconds(1e9) == pytest.approx(BASE_LATENCY + 5e-6 + 4 * 0.5e9 / (12.5e9 * REACHED["rdma"]))
    assert communication.all_to_all(machines, seats, 1, 1).seconds(1e9) == 0.0


@pytest.mark.parametrize(("recompute", "times"), [("none", 4), ("full", 6)])
def test_a_layer_exchanges_its_slots_twice_in_each_pass(recompute, times):
    recipe, machines = moe(), cluster(("a100-80", 1, 4))
    chosen = layout([("a100-80", 1)], (4,), data=4, expert=4, recompute=recompute)
    [cost] = Predictor(recipe, machines).costs(chosen)
    exchange = communication.all_to_all(machines, Seats(machines, chosen.placement).of(0, 4), 1, 4)
    assert cost.layer.expert == pytest.approx(times * exchange.seconds(2 * 1024 * 2 * 1024))
    parts = Predictor(recipe, machines).parts(chosen)
    assert parts.expert == pytest.approx(4 * 4 * cost.layer.expert)
    assert Predictor(gpt(), machines).parts(layout([("a100-80", 1)], (8,), data=4)).expert == 0.0


def test_a_token_costs_its_active_parameters():
    machines = cluster(("a100-80", 1, 1))
    few, all_, dense = (
        Predictor(recipe, machines).costs(layout([("a100-80", 1)], (4,)))[0].layer.forward
        for recipe in (moe(), moe(experts_per_token=8), moe(dense_layers=[0, 1, 2, 3]))
    )
    assert dense < few < all_
    half = Predictor(moe(dense_layers=[0, 2]), machines).costs(layout([("a100-80", 1)], (4,)))[0].layer.forward
    assert half == pytest.approx((dense + few) / 2)


def test_imbalance_costs_expert_ranks_time_and_no_one_else():
    # Wide enough that the host does not limit the step.
    recipe, machines = moe(hidden=4096, heads=32, ffn=8192), cluster(("a100-80", 1, 4))
    for expert in (1, 4):
        chosen = layout([("a100-80", 1)], (4,), data=4, expert=expert)
        even, uneven = (Predictor(recipe, machines, imbalance=each).parts(chosen) for each in (1.0, 2.0))
        assert (uneven.compute > even.compute) == (uneven.expert > even.expert) == (expert > 1)


def test_gradients_of_experts_are_reduced_over_the_ranks_that_hold_them():
    recipe, machines = moe(), cluster(("a100-80", 1, 4))
    whole, split = (
        Predictor(recipe, machines).step(layout([("a100-80", 1)], (2, 2), data=2, expert=expert)) for expert in (1, 2)
    )
    experts = 8 * 3 * 1024 * 2048
    assert whole.table.params[0].layer - split.table.params[0].layer == experts
    assert split.table.params[0].experts == experts // 2
    times = whole.times((2, 2))
    assert split.after((2, 2), times, 0)[0] < whole.after((2, 2), times, 0)[0] / 2


def test_the_search_finds_what_the_best_expert_degree_gives():
    recipe, machines = moe(layers=2), cluster(("a100-80", 1, 4))
    found = search(recipe, machines, top=200, limits=LIMITS)
    assert found.complete
    assert {plan.layout.expert for plan in found.plans} == {1, 2, 4}
    for plan in found.plans:
        written = plan.layout.written(recipe)
        assert data_ranks(written, plan.layout.world) == plan.layout.data
        assert written.parallel.expert == plan.layout.expert
        assert (f"expert {plan.layout.expert}" in shown(plan.layout)) == (plan.layout.expert > 1)
        assert predicted(written, machines).plans[0].seconds == pytest.approx(plan.seconds)
    few = search(recipe, machines, top=1, limits=LIMITS).plans[0]
    assert few.seconds == pytest.approx(found.plans[0].seconds)


def test_expert_degrees_divide_experts_and_ranks():
    assert layout_space.experts(moe(), 12) == (1, 2, 4)
    assert layout_space.experts(gpt(), 12) == (1,)
    assert layout_space.all_experts(moe(), 4) == [1, 2, 4]


def test_a_stage_of_dense_layers_does_not_hide_one_with_experts():
    recipe = moe(layers=8, dense_layers=[2, 3], parallel={"pipeline": 4})
    chosen = layout([("a100-80", 1)], (2, 2, 2, 2))
    predictor = Predictor(recipe, cluster(("a100-80", 1, 4)))
    rooms = memory_fit.rooms(predictor, chosen, memory_fit.deciding_ranks(predictor, chosen))
    assert [room.rank for room in rooms] == [0, 1, 2, 3]
    assert rooms[1].memory.weights < rooms[2].memory.weights


def test_a_gpu_whose_other_peaks_are_not_given_computes_the_router_in_its_own_precision():
    gpu = {"name": "mine", "memory_gib": 80, "bf16": 300.0, "bandwidth_gb": 2000.0}
    nodes = [{"type": "mine", "count": 1, "gpu": "mine", "gpus": 2}]
    without, with_ = (
        Predictor(moe(), Cluster.model_validate({"nodes": nodes, "gpus": [gpu | more]})).seconds(
            layout([("mine", 1)], (4,), data=2)
        )
        for more in ({}, {"fp32": 60.0})
    )
    assert without == pytest.approx(with_, rel=0.02)  # The router is small.


def test_megatron_is_not_predicted_for_experts():
    for look in (search, predicted):
        with pytest.raises(UserError, match="is not predicted for mixtral"):
            look(moe(), cluster(("a100-80", 1, 4)), software=MEGATRON)
