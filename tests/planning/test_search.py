"""The search against looking at everything."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.core.errors import UserError
from steelyard.core.recipe import Recipe, load_recipe
from steelyard.planning import layout_space, memory_fit, partition, plan_pages
from steelyard.planning.best_first import QUICK, loosest
from steelyard.planning.candidates import MeshCandidate
from steelyard.planning.cluster import Cluster
from steelyard.planning.layout import Layout
from steelyard.planning.layout_space import SearchLimits, Use
from steelyard.planning.plan_report import PlanRequest, as_text, shown
from steelyard.planning.predict import Predictor
from steelyard.planning.search import MANY_PARTITIONS, search
from steelyard.planning.search import given as predicted
from steelyard.planning.software import EAGER, MEGATRON, STEELYARD, as_run
from steelyard.sizes.rank_check import data_ranks
from tests.planning.exhaustive_search import Space, compositions, drawn
from tests.planning.machines import FASOP, cluster, fasops_cluster, gpt, gpt2_xl

SEEDS = 72  # random spaces
FAST = [*range(8), 174]  # those of the fast tests; 174 needs the comparison of all layouts


def found_and_best(space, objective):
    """What a complete search finds, and what an exhaustive search finds, as (seconds, value)."""
    found = search(space.recipe, space.machines, objective, 1, space.limits, space.software)
    assert found.complete, found.incomplete
    of = "cost" if objective == "pareto" else objective
    return [(plan.seconds, plan.value(of)) for plan in found.plans], space.best(objective)


@pytest.mark.parametrize("seed", [*FAST, *(pytest.param(n, marks=pytest.mark.slow) for n in range(8, SEEDS))])
def test_the_search_finds_what_an_exhaustive_search_finds(seed):
    found, best = found_and_best(*drawn(seed))
    assert found == [pytest.approx(point, rel=1e-9) for point in best]


TOO_LARGE = {12}  # random spaces of many passes in which not all partitions are compared


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 20))])
def test_the_same_for_steps_of_many_passes(seed):
    space, objective = drawn(seed, batches=(32, 64))
    assert any(each.pipeline * 2 * space.recipe.train.global_batch > QUICK for each in space.everything())
    if seed in TOO_LARGE:
        found = search(space.recipe, space.machines, objective, 1, space.limits, space.software)
        assert found.incomplete == MANY_PARTITIONS
    else:
        found, best = found_and_best(space, objective)
        assert found == [pytest.approx(point, rel=1e-9) for point in best]


def test_the_random_spaces_contain_every_option():
    spaces = [drawn(seed) for seed in range(24)]
    layouts = [layout for space, _ in spaces for layout in space.everything()]
    assert {layout.schedule for layout in layouts} == {"1f1b", "gpipe", "interleaved", "zero-bubble"}
    assert {layout.zero for layout in layouts} == {0, 1, 2, 3}
    assert {layout.recompute for layout in layouts} == {"none", "selective", "full"}
    assert all(max(getattr(each, axis) for each in layouts) > 1 for axis in ("tensor", "context", "pipeline", "expert"))
    assert {objective for _, objective in spaces} == {"time", "cost", "energy", "pareto"}
    assert {space.software.name for space, _ in spaces} == {"steelyard", "megatron", "megatron-deepspeed", "torchtitan"}


def test_nothing_better_is_missed_where_the_first_guess_of_a_partition_ranks_wrongly():
    recipe, machines = gpt(layers=6, hidden=4096, batch=8), cluster(("t4", 2, 1), ("a10", 1, 1), network=1.0)
    limits = SearchLimits(micro_batch=1, schedules=("1f1b", "gpipe"), recomputes=("none",), zeros=(0,))
    found, best = found_and_best(Space(recipe, machines, limits), "time")
    assert found == [pytest.approx(point, rel=1e-9) for point in best]


def test_a_space_with_too_many_partitions_is_not_called_complete():
    recipe, machines = gpt(layers=24, batch=64), cluster(("a10", 2, 4))
    found = search(recipe, machines, top=1, limits=SearchLimits(micro_batch=2, virtual=1, subsets=False))
    assert not found.complete
    assert "too many partitions" in as_text(PlanRequest(recipe, machines, 1000), found)


def test_a_search_shows_its_progress_and_the_time_left_in_every_phase(capsys, monkeypatch):
    monkeypatch.setattr("steelyard.core.console.SECONDS_BETWEEN_LINES", 0.0)
    monkeypatch.setattr("steelyard.planning.best_first.OFTEN", 1)
    search(gpt(layers=2, batch=4), cluster(("a10", 2, 1)), limits=SearchLimits(micro_batch=1))
    lines = capsys.readouterr().err.splitlines()
    for task in ("searching", "refining plans", "comparing all layouts"):
        assert any(line.startswith(f"{task} ") and " left" in line for line in lines)


def test_a_mesh_is_bounded_by_zero_bubble_too_which_may_be_faster_than_1f1b():
    mesh = MeshCandidate(Use((), 0), 1, 1, 1, (("t4", 8),), 8, 1, "1f1b", 1)
    schedules = [("1f1b", 1), ("gpipe", 1), ("interleaved", 4), ("zero-bubble", 1), ("zero-bubble", 2)]
    found = {(each.schedule, each.virtual) for each in loosest(mesh, schedules)}
    assert found == {("1f1b", 4), ("zero-bubble", 2)}
    assert [each.schedule for each in loosest(mesh, schedules[:1])] == ["1f1b"]


def best_with(recipe, machines, sequences, **more):
    limits = SearchLimits(virtual=1, schedules=("1f1b",), subsets=False, sequences=sequences, **more)
    plans = search(recipe, machines, top=20, limits=limits).plans
    return min((plan for plan in plans if plan.layout.tensor > 1), key=lambda plan: plan.seconds)


@pytest.mark.parametrize(("hidden", "length", "on"), [(4096, 8192, True), (256, 256, False)])
def test_sequence_parallelism_is_on_or_off_as_is_faster(hidden, length, on):
    # Wide layers save passes over the stream; narrow ones wait for the host, which starts twice as many collectives.
    recipe, machines = gpt(layers=2, hidden=hidden, length=length, batch=4), cluster(("a100-80", 1, 2))
    chosen = best_with(recipe, machines, (True, False), micro_batch=1)
    on_only, off_only = (best_with(recipe, machines, (each,), micro_batch=1) for each in (True, False))
    assert chosen.layout.sequence_parallel == on
    assert (on_only.seconds < off_only.seconds) == on
    assert chosen.seconds == min(on_only.seconds, off_only.seconds)
    assert ("no sequence parallel" in shown(chosen.layout)) == (not on)
    assert chosen.layout.written(recipe).parallel.sequence_parallel == on


def test_sequence_parallelism_is_off_where_only_that_fits():
    # Two tensor ranks under selective recomputation keep what was gathered for every exchange beside the stream.
    recipe = gpt(layers=24, hidden=2048, batch=8, length=2048)
    nodes = [{"type": "mine", "count": 1, "gpu": "mine", "gpus": 2}]
    chosen = [Layout(2, 1, 1, 1, 1, 0, on, "1f1b", 8, "selective", (24,), (("mine", 1),)) for on in (True, False)]

    def machines(memory):
        gpu = {"name": "mine", "memory_gib": memory, "fp16": 100.0, "bandwidth_gb": 800.0}
        return Cluster.model_validate({"nodes": nodes, "gpus": [gpu]})

    needs = [memory_fit.rooms(Predictor(recipe, machines(80)), each)[0].memory.total / 2**30 for each in chosen]
    assert needs[1] < needs[0]
    between = machines(sum(needs) / 2 + 2)
    limits = SearchLimits(
        recomputes=("selective",), zeros=(0,), subsets=False, micro_batch=8, schedules=("1f1b",), virtual=1
    )
    for sequences in ((True, False), (True,)):
        plans = search(recipe, between, top=20, limits=replace(limits, sequences=sequences)).plans
        kept = [plan.layout for plan in plans if (plan.layout.tensor, plan.layout.micro_batch) == (2, 8)]
        assert [each.sequence_parallel for each in kept] == ([False] if False in sequences else [])


def test_a_sequence_that_does_not_divide_is_not_cut():
    recipe = gpt(layers=2, length=1022, batch=4)
    assert layout_space.sequences(recipe, 4, 1, SearchLimits()) == [False]
    assert layout_space.sequences(recipe, 2, 1, SearchLimits()) == [True, False]
    assert layout_space.sequences(recipe, 1, 1, SearchLimits()) == [False]


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([64, 256, 1024, 2048]), st.sampled_from([1, 4]), st.sampled_from([1, 2, 4]),
       st.lists(st.sampled_from(["a10", "t4", "a100-40"]), min_size=1, max_size=3),
       st.sampled_from(["1f1b", "gpipe", "interleaved", "zero-bubble"]), st.sampled_from([STEELYARD, EAGER, MEGATRON]),
       st.sampled_from([0.1, 12.5]), st.sampled_from([1, 2]))  # fmt: skip
def test_no_partition_beats_the_bound_of_all_of_them(
    hidden, micro_batch, rounds, gpus, schedule, software, network, data
):
    # Small layers wait for the host while the head keeps the GPU busy: seconds of both must not be added up.
    pipeline, virtual = len(gpus), 2 if schedule == "interleaved" else 1
    batch = rounds * pipeline * micro_batch * data
    recipe = gpt(layers=4, hidden=hidden, heads=8, batch=batch, length=512)
    machines = cluster(("a10", 6, 1), ("t4", 6, 1), ("a100-40", 6, 1), network=network)
    nodes = tuple((gpu, data) for gpu in gpus)
    chosen = Layout(1, 1, pipeline, virtual, data, 0, False, schedule, micro_batch, "none", (), nodes)
    predictor = Predictor(recipe, machines, software)
    step = predictor.step(chosen)
    best = min(step.seconds(partition.spread(counts, virtual)) for counts in compositions(4, pipeline))
    assert predictor.bound(chosen) <= best * (1 + 1e-9)


def test_all_plans_for_fasops_cluster_fit():
    recipe, machines = gpt2_xl(), fasops_cluster()
    found = search(recipe, machines, limits=SearchLimits(schedules=("1f1b",), virtual=1))
    assert len(found.plans) == 10
    for plan in found.plans:
        assert memory_fit.fits(Predictor(recipe, machines), plan.layout)
    assert [plan.seconds for plan in found.plans] == sorted(plan.seconds for plan in found.plans)


def test_fasops_candidates_are_all_in_the_space():
    recipe, machines = gpt2_xl(), fasops_cluster()
    candidates = 0
    for use in layout_space.uses(machines, FASOP)[0]:
        for tensor in layout_space.tensors(recipe, machines, use, FASOP):
            for micro_batch in layout_space.micro_batches(recipe, FASOP):
                meshes = list(layout_space.meshes(use.ranks // tensor, 64 // micro_batch, 48))
                candidates += sum(len(layout_space.orders(use, FASOP)) for _ in meshes)
    assert candidates >= 592


@settings(max_examples=15, deadline=None)
@given(st.floats(2.0, 40.0), st.floats(1.0, 4.0))
def test_more_memory_never_excludes_a_plan(gigabytes, factor):
    def found(memory):
        gpu = {"name": "mine", "memory_gib": memory, "fp16": 100.0, "bandwidth_gb": 800.0}
        nodes = [{"type": "mine", "count": 1, "gpu": "mine", "gpus": 4}]
        machines = Cluster.model_validate({"nodes": nodes, "gpus": [gpu]})
        return search(gpt(layers=4), machines, top=1, limits=SearchLimits(micro_batch=2, virtual=1)).plans

    small, large = found(gigabytes), found(gigabytes * factor)
    assert len(large) >= len(small)
    if small:
        assert large[0].seconds <= small[0].seconds * (1 + 1e-9)


def test_experts_are_planned_where_the_batch_holds_fewer_samples_than_a_micro_batch_on_all_nodes():
    recipe = load_recipe("mixtral-8x7b", ["train.global_batch=64"])
    (best,) = search(recipe, cluster(("a100", 2, 8)), top=1).plans
    assert best.layout.data * best.layout.micro_batch <= 64


def test_a_gpu_without_the_precision_is_left_out():
    recipe = gpt(precision="bf16")
    found = search(recipe, cluster(("t4", 1, 4), ("a10", 1, 4)), top=3)
    assert all(type_ == "a10" for plan in found.plans for type_, _ in plan.layout.placement)


def test_cost_and_energy_choose_fewer_nodes_than_time():
    recipe, machines = gpt(layers=24, hidden=2048, batch=128), fasops_cluster()
    limits = SearchLimits(micro_batch=4, virtual=1, schedules=("1f1b",))
    fastest, cheapest, coolest = (
        search(recipe, machines, objective, 1, limits).plans[0] for objective in ("time", "cost", "energy")
    )
    assert fastest.seconds <= min(cheapest.seconds, coolest.seconds)
    assert cheapest.value("cost") <= fastest.value("cost")
    assert coolest.value("energy") <= fastest.value("energy")
    assert cheapest.layout.world < fastest.layout.world


def test_the_frontier_holds_no_plan_that_another_beats_in_both():
    limits = SearchLimits(micro_batch=4, virtual=1, schedules=("1f1b",))
    plans = search(gpt(layers=24, hidden=2048, batch=128), fasops_cluster(), "pareto", 10, limits).plans
    points = sorted((plan.seconds, plan.value("cost")) for plan in plans)
    assert len(points) > 1
    assert all(one[1] > other[1] for one, other in pairwise(points))
    shorter = search(gpt(layers=24, hidden=2048, batch=128), fasops_cluster(), "pareto", 1, limits).plans
    assert len(shorter) == len(plans)  # `top` does not cut it.


@pytest.mark.slow
def test_a_frontier_is_one_after_its_partitions_were_refined():
    limits = SearchLimits(micro_batch=4, virtual=2, schedules=("1f1b", "interleaved"))
    plans = search(gpt2_xl(), fasops_cluster(), "pareto", limits=limits).plans
    points = [(plan.seconds, plan.value("cost")) for plan in plans]
    assert len(points) > 1
    assert all(one[0] < other[0] and one[1] > other[1] for one, other in pairwise(points))


def test_a_frontier_that_was_cut_off_among_fast_plans_holds_the_cheap_ones_too():
    recipe, machines = gpt(layers=24, hidden=2048, batch=128), fasops_cluster()
    limits = SearchLimits(micro_batch=4, virtual=1, schedules=("1f1b",), meshes=4)
    cheapest = search(recipe, machines, "cost", 1, limits).plans[0]
    plans = search(recipe, machines, "pareto", 10, limits).plans
    assert plans[-1].value("cost") == pytest.approx(cheapest.value("cost"))
    assert plans[0].seconds < cheapest.seconds


@pytest.mark.parametrize(
    ("compile_", "splits", "software", "runs"),
    [
        (None, False, STEELYARD, STEELYARD),
        (None, True, STEELYARD, EAGER),
        (False, False, STEELYARD, EAGER),
        (True, False, STEELYARD, STEELYARD),
        (False, True, MEGATRON, MEGATRON),
    ],
)
def test_software_is_predicted_as_it_runs_the_recipe(compile_, splits, software, runs):
    assert as_run(software, gpt(compile=compile_), splits) is runs


def test_the_recipes_own_layout_is_predicted_as_the_search_does():
    machines = cluster(("a10", 1, 2))
    for more in ({"compile": False}, {}):
        recipe = gpt(layers=8, **more)
        schedule = "1f1b" if more else "zero-bubble"
        limits = SearchLimits(tensor=1, micro_batch=1, schedules=(schedule,), subsets=False, virtual=1)
        best = search(recipe, machines, top=1, limits=limits).plans[0]
        again = predicted(best.layout.written(recipe), machines).plans[0]
        assert again.seconds == pytest.approx(best.seconds)


def test_a_pipeline_is_drawn_as_it_was_predicted():
    recipe, machines = gpt(layers=8), cluster(("a10", 1, 2))
    limits = SearchLimits(tensor=1, micro_batch=1, schedules=("1f1b",), virtual=1, subsets=False)
    for software in (STEELYARD, MEGATRON):
        found = search(recipe, machines, limits=limits, software=software).plans
        plan = next(plan for plan in found if plan.layout.pipeline == 2)
        page = plan_pages.pipeline(PlanRequest(recipe, machines, 10**9, software=software), plan)
        assert f"80% range: {plan.range} s" in page
        drawn = float(page.split(" ms from left to right")[0].rsplit(" ", 1)[1]) / 1e3
        parts = plan.parts
        assert drawn == pytest.approx(parts.compute + parts.tensor + parts.bubble + parts.pipeline, rel=0.02)


@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"attention_dropout": 0.1, "positions": 8192}, "data": {"sequence_length": 8192}},
        {"train": {"init_from": "runs/dense"}, "sparsity": {"method": "learned", "distill": 0.5}},
        {"train": {"batch_ramp": {"start": 4, "increment": 4, "samples": 100}}},
    ],
)
def test_every_plan_can_be_written(changes):
    values = gpt(layers=4).settings()
    for section, keys in changes.items():
        values[section] = values.get(section, {}) | keys
    recipe = Recipe.model_validate(values)
    plans = search(recipe, cluster(("a100-80", 1, 8)), top=40, limits=SearchLimits(micro_batch=4)).plans
    assert plans
    for plan in plans:
        assert data_ranks(plan.layout.written(recipe), plan.layout.world) == plan.layout.data


def test_what_cannot_be_planned_is_refused_by_name():
    hybrid = Recipe.model_validate(gpt().settings() | {"parallel": {"replicate": 2, "zero": 1, "data": 4}})
    with pytest.raises(UserError, match="hybrid sharding"):
        search(hybrid, cluster(("a10", 1, 4)))
    for look in (search, predicted):
        with pytest.raises(UserError, match="no bf16 peak is known for t4"):
            look(gpt(precision="bf16"), cluster(("t4", 1, 4)))


def test_nodes_that_a_given_layout_leaves_idle_are_not_paid_for():
    recipe = Recipe.model_validate(gpt().settings() | {"parallel": {"data": 8}})
    plan = predicted(recipe, cluster(("a100-40", 1, 4), ("a10", 7, 4), price_hour=3.0)).plans[0]
    assert plan.layout.placement == (("a100-40", 1), ("a10", 1))
    assert plan.price_hour == 6.0


def test_any_number_of_nodes_is_tried_and_an_answer_is_only_called_complete_if_all_were():
    few, many = cluster(("a10", 7, 1)), cluster(("a10", 40, 1), ("t4", 40, 1))
    uses, whole = layout_space.uses(few, SearchLimits())
    assert whole
    assert [use.ranks for use in uses] == [7, 6, 5, 4, 3, 2, 1]
    uses, whole = layout_space.uses(many, SearchLimits())
    assert not whole
    assert {use.ranks for use in uses if len(use.counts) == 1} == {40, 32, 24, 16, 12, 8, 6, 4, 3, 2, 1}
    assert not search(
        gpt(layers=2), many, "time", 1, SearchLimits(tensor=1, micro_batch=1, virtual=1, meshes=1)
    ).complete


@pytest.mark.parametrize(("arrangements", "complete"), [(3, True), (2, False)])
def test_an_answer_is_only_called_complete_if_all_orders_of_nodes_were_tried(arrangements, complete):
    limits = SearchLimits(tensor=1, micro_batch=1, virtual=1, subsets=False, arrangements=arrangements)
    assert search(gpt(layers=2), cluster(("a10", 2, 1), ("t4", 1, 1)), limits=limits).complete == complete


def test_one_node_is_found_where_it_is_the_cheapest():
    recipe = gpt(layers=48, hidden=1600, heads=16, batch=16)
    found = search(recipe, cluster(("a10", 8, 4), price_hour=4.0), "cost", 3)
    assert found.plans[0].layout.placement == (("a10", 1),)


def test_layouts_that_megatron_lacks_are_not_ranked_for_it():
    machines = cluster(("a100-40", 1, 4), ("a10", 3, 4))
    long = Recipe.model_validate(gpt(layers=12, length=8192).settings())
    found = search(long, machines, top=40, software=MEGATRON)
    assert len(found.plans) > 10
    for plan in found.plans:
        layout = plan.layout
        assert layout.schedule in ("1f1b", "interleaved")
        assert (layout.context, layout.zero < 2) == (1, True)
        assert len(set(layout.partition)) == 1
        held = memory_fit.rooms(Predictor(long, machines, MEGATRON), layout)
        assert all(room.fits for room in held)


def test_the_distributed_optimizer_deals_out_what_megatron_keeps_in_fp32():
    recipe, machines = gpt(), cluster(("a10", 1, 4))
    predictor = Predictor(recipe, machines, MEGATRON)
    held = predictor.step(chosen := Layout(1, 1, 1, 1, 4, 0, False, "1f1b", 1, "none", (8,), (("a10", 1),))).held(
        (8,), 0
    )
    [whole], [dealt] = (memory_fit.rooms(predictor, replace(chosen, zero=zero)) for zero in (0, 1))
    assert whole.memory.optimizer == 16 * held
    assert dealt.memory.optimizer == 4 * held
    assert whole.memory.weights + whole.memory.gradients == 4 * held


def test_megatrons_short_pipelines_are_predicted_and_ours_refused():
    # Two micro-batches on four ranks: Megatron's 1F1B runs them, PyTorch's does not.
    settings_ = gpt(batch=2).settings() | {"parallel": {"pipeline": 4, "data": 1}}
    recipe, machines = Recipe.model_validate(settings_), cluster(("a100-40", 1, 4))
    plan = predicted(recipe, machines, MEGATRON).plans[0]
    assert plan.layout.schedule == "1f1b"
    assert plan.parts.bubble > 0
    with pytest.raises(UserError, match="needs at least 4 micro-batches, not 2"):
        predicted(recipe, machines)
    written = plan.layout.written(recipe)  # And what is written runs here.
    assert written.parallel.schedule == "gpipe"
    assert data_ranks(written, 4) == 1
    offloaded = Recipe.model_validate(recipe.settings() | {"optim": {"offload": True}})
    for look in (search, predicted):
        with pytest.raises(UserError, match="keeps its optimizer on the GPU"):
            look(offloaded, machines, software=MEGATRON)


def test_a_placed_layout_may_leave_gpus_of_its_last_node_idle_but_no_node():
    parallel = {"data": 6, "placement": ["a10:2"]}
    recipe = Recipe.model_validate(gpt(batch=12).settings() | {"parallel": parallel})
    assert predicted(recipe, cluster(("a10", 4, 4))).plans[0].layout.world == 6
    parallel["placement"] = ["a10:3"]
    recipe = Recipe.model_validate(gpt(batch=12).settings() | {"parallel": parallel})
    with pytest.raises(UserError, match="runs on 6 ranks, not on 12"):
        predicted(recipe, cluster(("a10", 4, 4)))


def test_power_that_is_not_known_is_not_counted_as_none():
    gpu = {"name": "mine", "memory_gib": 40, "fp16": 100.0, "bandwidth_gb": 800.0}
    nodes = [{"type": "mine", "count": 1, "gpu": "mine", "gpus": 1, "idle_watts": 100.0}]
    machines = Cluster.model_validate({"nodes": nodes, "gpus": [gpu]})
    assert predicted(gpt(layers=2), machines).plans[0].watts is None


@pytest.mark.slow
def test_a_thousand_gpus_of_three_types_are_planned():
    from steelyard.core.recipe import load_recipe

    recipe = load_recipe(
        "llama3.1-70b", ["train.global_batch=960", "train.precision=bf16", "data.sequence_length=4096"]
    )
    machines = cluster(("a100-80", 50, 8), ("h100-80", 25, 8), ("a40", 50, 8), network=100.0)
    found = search(recipe, machines)
    assert len(found.plans) == 10
    assert all(memory_fit.fits(Predictor(recipe, machines), plan.layout) for plan in found.plans)
