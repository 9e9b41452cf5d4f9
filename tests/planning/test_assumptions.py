"""Every default that a prediction uses is listed, and every idle node with the reason that holds."""

from dataclasses import asdict

import pytest

from steelyard.core.recipe import Recipe
from steelyard.planning import memory_fit
from steelyard.planning.assumptions import as_lines, assumptions
from steelyard.planning.cluster import Cluster, Link, Nodes, OwnGpu
from steelyard.planning.layout_space import SearchLimits
from steelyard.planning.measured_layers import Profile
from steelyard.planning.plan_report import PlanRequest, as_result, as_text
from steelyard.planning.predict import Predictor
from steelyard.planning.search import given, search
from tests.planning.machines import cluster, gpt, layout

NODE = {
    "type": "a", "count": 2, "gpu": "mine", "gpus": 4, "partition": "p", "gres": "gpu:4", "zone": "z",
    "price_hour": 9.0, "intra_GBps": 300.0, "intra_latency_us": 3.0, "intra_transport": "nvlink", "idle_watts": 200.0,
    "host_gib": 512.0, "host_GBps": 200.0, "host_link_GBps": 25.0, "host_operation_us": 6.0,
}  # fmt: skip
GPU = {
    "name": "mine", "memory_gib": 80.0, "fp32": 20.0, "tf32": 150.0, "fp16": 300.0, "bf16": 300.0, "fp8": 600.0,
    "bandwidth_gb": 2000.0, "units": 100, "watts": 400.0, "link_gb": 300.0, "sustained": 0.8,
}  # fmt: skip
LINK = {"between": ["a", "a"], "GBps": 25.0, "latency_us": 3.0, "transport": "rdma"}
OTHER = {  # A value that is not the default.
    "partition": "q", "gres": "gpu:1", "zone": "y", "price_hour": 5.0, "intra_GBps": 7.0, "intra_latency_us": 40.0,
    "intra_transport": "tcp", "idle_watts": 50.0, "host_gib": 0.001, "host_GBps": 50.0, "host_link_GBps": 5.0,
    "host_operation_us": 30.0, "fp32": 10.0, "tf32": 60.0, "fp16": 77.0, "bf16": 78.0, "fp8": 79.0, "units": 40,
    "watts": 99.0, "link_gb": 5.0, "sustained": 0.3, "latency_us": 400.0, "transport": "rdma",
}  # fmt: skip
NOT_USED = ("partition", "gres", "zone", "fp32", "tf32", "fp16", "bf16", "fp8", "link_gb")  # with `NODE` and bf16
TABLES = {"nodes": (Nodes, NODE), "gpus": (OwnGpu, GPU), "links": (Link, LINK)}
OPTIONAL = [
    (table, key)
    for table, (section, _) in TABLES.items()
    for key, field in section.model_fields.items()
    if not field.is_required()
]


def machines_of(**tables) -> Cluster:
    return Cluster.model_validate({"nodes": [NODE], "gpus": [GPU], "links": [LINK]} | tables)


def offloading(recipe: Recipe) -> Recipe:
    return Recipe.model_validate(recipe.settings() | {"optim": {"offload": True}})


def listed(machines: Cluster, chosen=None, recipe: Recipe | None = None, **more):
    recipe = recipe or gpt(precision="bf16")
    return assumptions(Predictor(recipe, machines), chosen or layout([("a", 2)], (8,), data=8), **more)


def test_a_complete_file_has_no_defaults():
    for section, values in TABLES.values():
        assert values.keys() == section.model_fields.keys()
    assert listed(machines_of(), recipe=offloading(gpt(precision="bf16"))) == []


@pytest.mark.parametrize(("table", "key"), OPTIONAL)
def test_every_key_that_is_missing_is_listed(table, key):
    values = {name: value for name, value in TABLES[table][1].items() if name != key}
    found = listed(machines_of(**{table: [values]}), recipe=offloading(gpt(precision="bf16")))
    assert [each.key for each in found] == ([] if key in NOT_USED else [key])
    assert all(each.text.startswith(f"{key} ") and each.best_plan for each in found)


def bare(table: str) -> dict:
    section, values = TABLES[table]
    return {key: values[key] for key, field in section.model_fields.items() if field.is_required()}


@pytest.mark.parametrize(
    ("gpu", "gpus", "linked", "precision"),
    [("mine", 4, True, "bf16"), ("mine", 1, True, "bf16"), ("mine", 2, False, "fp32"), ("t4", 4, True, "fp16"),
     ("cpu", 1, True, "fp32"), ("cpu", 2, False, "fp32")],
)  # fmt: skip
def test_a_default_that_changes_a_figure_is_listed(gpu, gpus, linked, precision):
    """In a file with required keys only, each other key is given in turn."""
    tables = {"nodes": bare("nodes") | {"gpu": gpu, "gpus": gpus}, "gpus": bare("gpus") | {precision: 100.0}}
    tables |= {"links": bare("links")} if linked else {}
    for recipe in (gpt(precision=precision), offloading(gpt(precision=precision))):

        def figures(changed=(), recipe=recipe):
            values = {
                name: [each | dict([changed[1]] if changed[:1] == (name,) else [])] for name, each in tables.items()
            }
            machines = Cluster.model_validate(values)
            predictor, placement = Predictor(recipe, machines), (("a", 2),)
            layouts = [layout(placement, (4, 4), data=gpus), layout(placement, (8,), data=2 * gpus, zero=2)]
            rooms = [room.usable for each in layouts for room in memory_fit.rooms(predictor, each)]
            hosts = [room.host_usable for each in layouts for room in memory_fit.rooms(predictor, each) if room.host]
            times = [predictor.seconds(each) for each in layouts]
            return (times, rooms, hosts, machines.price_hour(placement), machines.watts(placement)), machines

        before, machines = figures()
        keys = {each.key for each in listed(machines, recipe=recipe)}
        used = {key for table, key in OPTIONAL if table in tables and figures((table, (key, OTHER[key])))[0] != before}
        assert used - {precision} <= keys
        assert {"price_hour", "host_operation_us", "watts" if gpu == "mine" else "idle_watts"} <= used
        assert ("links" in keys) == (not linked)


def test_defaults_of_a_link_are_listed_though_the_best_plan_does_not_use_it():
    nodes = [NODE | {"type": name, "count": 1} for name in ("a", "b")]
    found = listed(machines_of(nodes=nodes, links=[]), layout([("a", 1)], (8,), data=4))
    assert [(each.name, each.key, each.best_plan) for each in found] == [("between a and b", "links", False)]
    assert as_lines(found) == [
        "assumed for other plans: network between a and b: 1.25 GB/s Ethernet through sockets, 50 us; "
        "add a [[links]] table"
    ]
    both = listed(machines_of(nodes=nodes, links=[]), layout([("a", 1), ("b", 1)], (8,), data=8))
    assert [each.best_plan for each in both] == [True]


def test_one_line_has_all_nodes_with_the_same_default():
    nodes = [{key: NODE[key] for key in NODE if key != "price_hour"} | {"type": name} for name in ("a", "b")]
    links = [LINK | {"between": ["*", "*"]}]
    lines = as_lines(listed(machines_of(nodes=nodes, links=links), layout([("a", 2), ("b", 2)], (8,), data=16)))
    assert lines == ["assumed: nodes a, b: price_hour is not given: plans on these nodes have no price"]


def test_a_layout_that_is_given_rests_on_its_own_nodes_only():
    nodes = [NODE | {"type": name, "count": 2} for name in ("a", "b")]
    assert listed(machines_of(nodes=nodes, links=[]), layout([("a", 1)], (8,), data=4), searched=False) == []


def test_nodes_that_cannot_compute_in_the_precision_have_no_defaults():
    machines = cluster(("a100-80", 1, 2), ("v100-16", 1, 2))
    chosen = layout([("a100-80", 1)], (8,), data=2)
    assert {each.name for each in listed(machines, chosen) if each.of == "nodes"} == {"a100-80"}
    fp16 = listed(machines, chosen, gpt(precision="fp16"))
    assert {each.name for each in fp16 if each.of == "nodes"} == {"a100-80", "v100-16"}


def test_a_processor_and_an_extrapolated_rate_are_listed():
    machines = cluster(("cpu", 1, 2), ("a10", 1, 2))
    found = listed(machines, layout([("cpu", 1)], (8,), data=2), gpt(precision="fp32"))
    texts = {(each.name, each.key): each.text for each in found if each.of == "GPU"}
    for said in ("memory_gib = 4", "fp32 = 0.05", "bandwidth_gb = 8", "watts = 15"):
        assert said in texts["cpu", "gpu"]
    share = machines.gpu_by_type["a10"].sustained
    assert f"sustained = {share:g} of the peak (extrapolated" in texts["a10", "sustained"]


def test_what_a_profile_measured_is_no_default():
    machines, recipe, chosen = cluster(("a10", 1, 2)), gpt(), layout([("a10", 1)], (8,), data=2)
    profile = Profile.model_validate({
        "gpu": "a10", "device": "A10", "precision": "fp16", "hidden": 1024, "sequence_length": 1024, "date": "today",
        "versions": {}, "host": {}, "rates": {"product_tflops": 60.0, "link_gbps": 12.0, "link_latency_us": 9.0},
        "layers": [{"tensor": 1, "micro_batch": 1, "forward": 0.01, "backward": 0.02}],
    })  # fmt: skip
    plain, measured = (
        {each.key for each in assumptions(Predictor(recipe, machines, profiles=profiles), chosen)}
        for profiles in ((), (profile,))
    )
    assert plain - measured == {"sustained", "intra_GBps", "intra_latency_us"}


def test_an_even_load_of_experts_is_listed():
    values = gpt(precision="bf16").settings()
    values["model"] = {
        "family": "mixtral", "layers": 4, "hidden": 256, "heads": 4, "kv_heads": 4, "vocab": 512, "ffn": 512,
        "experts": 4, "experts_per_token": 2,
    }  # fmt: skip
    recipe, chosen = Recipe.model_validate(values), layout([("a", 2)], (4,), data=8, expert=4)
    [found] = listed(machines_of(), chosen, recipe)
    assert (found.key, found.best_plan) == ("--expert-imbalance", True)
    assert assumptions(Predictor(recipe, machines_of(), imbalance=1.5), chosen) == []


def test_nodes_without_the_precision_are_named_as_idle():
    recipe, machines = gpt(precision="bf16"), cluster(("a100-80", 1, 2), ("v100-16", 1, 2))
    request, found = PlanRequest(recipe, machines, 10**9), search(recipe, machines)
    assert "idle: 1 v100-16 (v100-16 has no bf16)" in as_text(request, found)
    result = as_result(request, found)
    assert result["idle_nodes"] == [{"type": "v100-16", "count": 1, "why": "v100-16 has no bf16"}]
    expected = assumptions(Predictor(recipe, machines), found.plans[0].layout)
    assert result["assumptions"] == [asdict(each) for each in expected]
    for line in as_lines(expected):
        assert line in as_text(request, found)


def test_the_reason_of_idle_nodes_is_that_of_the_search():
    machines, recipe = cluster(("a100-80", 1, 1), ("t4", 1, 1), network=0.1, transport="tcp"), gpt(layers=4)
    own = Recipe.model_validate(recipe.settings() | {"parallel": {"placement": ["a100-80:1"]}})
    limits = SearchLimits(micro_batch=4)
    cases = [
        (search(recipe, machines, limits=limits), False, "no better plan uses them"),
        (search(recipe, machines, limits=SearchLimits(micro_batch=4, meshes=1)), False, "it did not try all"),
        (given(own, machines), True, "the layout of the recipe does not use them"),
    ]
    assert [found.complete for found, _, _ in cases] == [True, False, True]
    for found, is_given, why in cases:
        assert found.plans[0].layout.placement == (("a100-80", 1),)
        request = PlanRequest(recipe, machines, 10**9, given=is_given)
        [idle] = as_result(request, found)["idle_nodes"]
        assert (idle["type"], why in idle["why"]) == ("t4", True)
        assert why in as_text(request, found)
        assert as_text(request, found).count("no better plan") == (why == "no better plan uses them")
