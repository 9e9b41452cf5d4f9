"""A prediction states its range, its evidence, its defaults and the nodes that it leaves idle."""

import pytest

from steelyard.planning.cluster import Cluster
from steelyard.planning.plan_report import as_result, as_text
from steelyard.planning.predict import Predictor
from steelyard.planning.search import search
from steelyard.planning.software import KNOWN, MEGATRON, TORCHTITAN
from steelyard.planning.uncertainty import assumptions, idle_nodes, range_of
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


def test_every_default_is_listed_and_a_complete_file_has_none():
    bare = Cluster.model_validate({"nodes": [{"type": "a10", "count": 2, "gpu": "a10", "gpus": 4}]})
    listed = "\n".join(assumptions(bare))
    for said in ("0.62 of the peak (extrapolated", "16 GB/s over pcie", "no price_hour", "1.25 GB/s Ethernet", "8 us"):
        assert said in listed
    node = {"type": "a100", "count": 2, "gpu": "a100-80", "gpus": 4, "intra_GBps": 300.0, "price_hour": 9.0}
    node["host_operation_us"] = 6.0
    link = {"between": ["a100", "a100"], "GBps": 25.0, "latency_us": 3.0, "transport": "rdma"}
    assert assumptions(Cluster.model_validate({"nodes": [node], "links": [link]})) == []
    socket = Cluster.model_validate({"nodes": [node], "links": [link | {"transport": None}]})
    assert assumptions(socket) == [
        'network within a100: sockets (transport = "tcp"); set transport = "rdma" if it has GPUDirect RDMA'
    ]


def test_defaults_of_a_gpu_of_the_file_are_listed():
    own = {"name": "mine", "memory_gib": 80, "fp16": 100.0, "bandwidth_gb": 1000.0}
    nodes = [{"type": "a", "count": 1, "gpu": "mine", "gpus": 1, "price_hour": 1.0}]
    listed = assumptions(Cluster.model_validate({"nodes": nodes, "gpus": [own]}))
    assert "GPU mine: sustained = 0.75 (default)" in listed
    listed = assumptions(Cluster.model_validate({"nodes": nodes, "gpus": [own | {"sustained": 0.6}]}))
    assert not any("sustained" in each for each in listed)


def test_nodes_without_the_precision_are_named_as_idle():
    machines = cluster(("a100-80", 1, 2), ("v100-16", 1, 2))
    found = search(gpt(precision="bf16"), machines)
    [idle] = idle_nodes(machines, found.plans[0].layout, "bf16")
    assert (idle.type, idle.count, idle.why) == ("v100-16", 1, "v100-16 has no bf16")
    recipe = gpt(precision="bf16")
    assert "idle: 1 v100-16 (v100-16 has no bf16)" in as_text(recipe, machines, found, 10**9, False)
    result = as_result(recipe, machines, found, 10**9, False)
    assert result["idle_nodes"] == [{"type": "v100-16", "count": 1, "why": "v100-16 has no bf16"}]
    assert result["assumptions"] == assumptions(machines, found.plans[0].layout)


def test_plans_are_ties_if_and_only_if_their_ranges_overlap():
    recipe, machines = gpt(), cluster(("a100-80", 1, 4))
    found = search(recipe, machines, top=100)
    plans = as_result(recipe, machines, found, 10**9, False)["plans"]
    best = plans[0]
    assert not best["ties_with_best"]
    assert {plan["ties_with_best"] for plan in plans[1:]} == {True, False}
    for plan in plans[1:]:
        assert plan["ties_with_best"] == (plan["seconds_low"] <= best["seconds_high"])


def test_the_nearest_miss_is_the_layout_that_lacks_the_least():
    gpu = {"name": "small", "memory_gib": 4, "fp16": 100.0, "bandwidth_gb": 800.0}
    nodes = [{"type": "small", "count": 1, "gpu": "small", "gpus": 2}]
    found = search(gpt(layers=24, hidden=2048, batch=4), Cluster.model_validate({"nodes": nodes, "gpus": [gpu]}))
    assert not found.plans
    lacks, chosen, why = found.nearest
    assert (chosen, why) in found.excluded
    assert lacks > 0
    assert "too much: pipeline rank" in why


def test_each_program_has_its_own_prediction():
    machines, recipe = cluster(("h200", 1, 1)), gpt(precision="bf16", hidden=2048, batch=4)
    chosen = layout([("h200", 1)], (8,))
    seconds = {name: Predictor(recipe, machines, program).seconds(chosen) for name, program in KNOWN.items()}
    assert set(seconds) == {"steelyard", "megatron", "torchtitan"}
    assert seconds["steelyard"] < seconds["torchtitan"]
    assert KNOWN["torchtitan"] is TORCHTITAN
    assert KNOWN["megatron"] is MEGATRON
