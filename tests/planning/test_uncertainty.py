"""A prediction states its range and its evidence, and a refusal the nearest miss."""

import pytest

from steelyard.planning import measured_ranks, memory_fit
from steelyard.planning.cluster import Cluster
from steelyard.planning.layout_space import SearchLimits
from steelyard.planning.plan_report import PlanRequest, as_result, as_text
from steelyard.planning.predict import Predictor
from steelyard.planning.results import SearchResult, plan_of
from steelyard.planning.search import search
from steelyard.planning.software import KNOWN, MEGATRON, TORCHTITAN
from steelyard.planning.uncertainty import Range, range_of
from tests.planning.machines import cluster, gpt, layout


def width(machines: Cluster, chosen, recipe=None) -> float:
    step = Predictor(recipe or gpt(), machines).step(chosen)
    parts = step.parts(chosen.partition)
    found = range_of(machines, {}, chosen, parts, step.host_share())
    assert found.low < parts.total < found.high
    return found.high / found.low


def test_a_range_is_wider_if_the_rate_of_a_gpu_is_extrapolated():
    recipe = gpt(hidden=4096)
    known, guessed = (width(cluster((gpu, 1, 1)), layout([(gpu, 1)], (8,)), recipe) for gpu in ("a100-80", "a10"))
    assert guessed > known * 1.1


def test_a_range_is_wider_if_the_host_decides():
    machines, chosen = cluster(("a100-80", 1, 1)), layout([("a100-80", 1)], (8,))
    small, large = (width(machines, chosen, gpt(hidden=hidden)) for hidden in (128, 4096))
    assert small > large * 1.2
    shares = [Predictor(gpt(hidden=hidden), machines).step(chosen).host_share() for hidden in (128, 4096)]
    assert shares[0] > 0.95
    assert shares[1] < 0.05


def test_a_range_is_wider_if_the_network_is_a_default():
    nodes = [{"type": "a100", "count": 2, "gpu": "a100-80", "gpus": 1}]
    slow = {"between": ["*", "*"], "GBps": 1.25}
    chosen = layout([("a100", 2)], (8,), data=2)
    widths = [
        width(Cluster.model_validate({"nodes": nodes, "links": links}), chosen)
        for links in ([slow | {"transport": "tcp"}], [slow], [])
    ]
    assert widths[0] < widths[1]
    assert widths[1] == pytest.approx(widths[2])


def tied(objective: str, machines: Cluster, *layouts) -> list[dict]:
    """Plans of these layouts, in this order, as `--json` has them."""
    recipe = gpt(hidden=2048)
    found = SearchResult([plan_of(Predictor(recipe, machines), each) for each in layouts])
    return as_result(PlanRequest(recipe, machines, 10**9, objective), found)["plans"]


def test_plans_are_ties_if_and_only_if_their_ranges_overlap():
    recipe, machines = gpt(), cluster(("a100-80", 1, 4))
    found = search(recipe, machines, top=100)
    plans = as_result(PlanRequest(recipe, machines, 10**9), found)["plans"]
    best = plans[0]
    assert not best["ties_with_best"]
    assert {plan["ties_with_best"] for plan in plans[1:]} == {True, False}
    for plan in plans[1:]:
        assert plan["ties_with_best"] == (plan["seconds_low"] <= best["seconds_high"])


@pytest.mark.parametrize("objective", ["time", "cost", "energy"])
def test_ties_are_those_of_the_objective(objective):
    gpu = {"memory_gib": 80, "fp16": 300.0, "bandwidth_gb": 2000.0, "link_gb": 300.0, "sustained": 0.8}
    gpus = [gpu | {"name": "cool", "watts": 100.0}, gpu | {"name": "hot", "watts": 1000.0}]
    nodes = [
        {"type": "one", "count": 2, "gpu": "cool", "gpus": 1, "price_hour": 1.0},
        {"type": "dear", "count": 1, "gpu": "cool", "gpus": 1, "price_hour": 10.0},
        {"type": "warm", "count": 1, "gpu": "hot", "gpus": 1, "price_hour": 1.0},
    ]
    links = [{"between": ["*", "*"], "GBps": 100.0, "transport": "rdma"}]
    machines = Cluster.model_validate({"nodes": nodes, "links": links, "gpus": gpus})
    alone = [layout([(type_, 1)], (8,)) for type_ in ("one", "dear", "warm")]
    plans = tied(objective, machines, *alone, layout([("one", 2)], (8,), data=2))
    expected = {"time": [True, True, False], "cost": [False, True, True], "energy": [True, False, True]}
    assert [plan["ties_with_best"] for plan in plans] == [False, *expected[objective]]


def test_a_frontier_ties_with_its_fastest_and_its_cheapest_plan():
    nodes = [
        {"type": str(price), "count": 1, "gpu": "a100-80", "gpus": 1, "price_hour": price} for price in (9.0, 8.9, 1.0)
    ]
    machines = Cluster.model_validate({"nodes": nodes})
    plans = tied("pareto", machines, *(layout([(str(price), 1)], (8,)) for price in (9.0, 8.9, 1.0)))
    assert [plan["ties_with_fastest"] for plan in plans] == [False, True, True]
    assert [plan["ties_with_cheapest"] for plan in plans] == [False, False, False]
    assert not any("ties_with_best" in plan for plan in plans)


def test_every_figure_of_a_plan_has_its_range_and_text_has_that_of_the_objective():
    recipe, machines = gpt(), cluster(("a100-80", 1, 4), price_hour=900.0, idle_watts=10.0)
    for objective, name in (("time", "seconds"), ("cost", "dollars"), ("energy", "kilowatt_hours")):
        request = PlanRequest(recipe, machines, 10**12, objective)
        found = search(recipe, machines, objective, top=2, limits=SearchLimits(tensor=1, micro_batch=4))
        best, text = as_result(request, found)["plans"][0], as_text(request, found)
        for each in ("seconds", "days", "dollars", "kilowatt_hours"):
            for end in ("low", "high"):
                expected = best[each] * best[f"seconds_{end}"] / best["seconds"]
                assert best[f"{each}_{end}"] == pytest.approx(expected)
        range_ = str(Range(best[f"{name}_low"], best[f"{name}_high"], ""))
        assert range_ in text.splitlines()[1]
        budget = next(line for line in text.splitlines() if " tokens take " in line)
        assert all(
            str(Range(best[f"{each}_low"], best[f"{each}_high"], "")) in budget
            for each in ("days", "dollars", "kilowatt_hours")
        )


def test_the_nearest_miss_is_the_layout_that_lacks_the_least():
    gpu = {"name": "small", "memory_gib": 4, "fp16": 100.0, "bandwidth_gb": 800.0}
    nodes = [{"type": "small", "count": 1, "gpu": "small", "gpus": 2}]
    found = search(gpt(layers=24, hidden=2048, batch=4), Cluster.model_validate({"nodes": nodes, "gpus": [gpu]}))
    assert not found.plans
    lacks, chosen, why = found.nearest
    assert (chosen, why) in found.excluded
    assert lacks > 0
    assert "too much: pipeline rank" in why


def test_the_nearest_miss_is_that_of_the_partition_that_lacks_the_least():
    gpu = {"fp16": 100.0, "bandwidth_gb": 800.0}
    gpus = [gpu | {"name": "large", "memory_gib": 6}, gpu | {"name": "small", "memory_gib": 2}]
    nodes = [{"type": each["name"], "count": 1, "gpu": each["name"], "gpus": 1} for each in gpus]
    recipe, machines = gpt(layers=12, hidden=2048, batch=4), Cluster.model_validate({"nodes": nodes, "gpus": gpus})
    limits = SearchLimits(micro_batch=1, schedules=("1f1b",), virtual=1, recomputes=("none", "full"))
    found = search(recipe, machines, limits=limits)
    assert not found.plans
    predictor, misses = Predictor(recipe, machines), []
    for chosen, _ in found.excluded:
        tried = [(first, 12 - first) for first in range(13)] if chosen.pipeline == 2 else [chosen.partition]
        misses += [memory_fit.lacking(memory_fit.rooms(predictor, chosen.with_partition(counts))) for counts in tried]
    assert found.nearest[1].pipeline == 2
    assert found.nearest[0] == pytest.approx(min(misses), rel=0.01)
    assert abs(found.nearest[1].partition[0] - found.nearest[1].partition[1]) > 2


@pytest.mark.parametrize(("factor", "where"), [(1.0, "inside"), (2.0, "outside"), (0.5, "outside")])
def test_a_measured_rank_is_inside_or_outside_the_range_of_its_prediction(factor, where):
    recipe = gpt(batch=64)
    machines = measured_ranks.free_cluster("a100-80", 8, host_operation_us=9.0)
    phases = measured_ranks.predicted_phases(recipe, machines, 0, 1.0)
    seconds = {phase: factor * value for phase, value in phases.items()}
    rank = {"rank": 0, "pipeline_rank": 0, "seconds": seconds, "compute_seconds": sum(seconds.values()),
            "peak_bytes": 1, "predicted_bytes": 1}  # fmt: skip
    result = measured_ranks.with_prediction({
        "recipe": "gpt", "gpu": "a100-80", "device": "A100", "world": 8, "precision": "fp16", "expert_imbalance": 1.0,
        "host": {"operation_us": 9.0}, "micro_batches": 8, "routing": None, "not_measured": [], "ranks": [rank],
        "layout": {"tensor": 1, "context": 1, "expert": 1, "pipeline": 1, "data": 8, "zero": 0, "micro_batch": 1},
    }, recipe)  # fmt: skip
    [found] = result["ranks"]
    assert found["predicted_compute_low"] < found["predicted_compute_seconds"] < found["predicted_compute_high"]
    assert found["inside_range"] == (where == "inside")
    assert f"the measured compute is {where} the 80% range of the prediction" in measured_ranks.as_text(result)


def test_each_program_has_its_own_prediction():
    machines, recipe = cluster(("h200", 1, 1)), gpt(precision="bf16", hidden=2048, batch=4)
    chosen = layout([("h200", 1)], (8,))
    seconds = {name: Predictor(recipe, machines, program).seconds(chosen) for name, program in KNOWN.items()}
    assert set(seconds) == {"steelyard", "megatron", "megatron-deepspeed", "torchtitan", "torchtitan-async-tp"}
    assert seconds["steelyard"] < seconds["torchtitan"]
    assert KNOWN["torchtitan"] is TORCHTITAN
    assert KNOWN["megatron"] is MEGATRON
