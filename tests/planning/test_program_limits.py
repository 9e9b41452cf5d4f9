"""What `--software` can select, and which layouts and recipes of other programs are predicted."""

from pathlib import Path

import pytest

from steelyard.cli.plan import Program
from steelyard.core.errors import UserError
from steelyard.core.recipe import Recipe
from steelyard.planning import memory_fit
from steelyard.planning.layout_space import SearchLimits
from steelyard.planning.predict import Predictor
from steelyard.planning.search import given, search
from steelyard.planning.software import DEEPSPEED, KNOWN, TORCHTITAN, TORCHTITAN_ASYNC_TP, TORCHTITAN_EAGER, as_run
from tests.planning.machines import cluster, gpt, layout

SMALL = SearchLimits(micro_batch=2, contexts=(1, 2), subsets=False)


def with_(recipe: Recipe, **sections) -> Recipe:
    settings = recipe.settings()
    for section, values in sections.items():
        settings[section] = settings.get(section, {}) | values
    return Recipe.model_validate(settings)


def test_the_command_can_select_every_known_program():
    assert [program.value for program in Program] == list(KNOWN)


def test_benchmarks_score_the_programs_that_a_user_can_select(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    import measured_steps

    assert next(measured_steps.fasops_cluster()).software is KNOWN["megatron"]
    assert {case.software.name for case in measured_steps.own_engine()} == {"steelyard"}
    assert measured_steps.SAILORS["GPT-Neo-2.7B"] is KNOWN["megatron-deepspeed"]
    assert measured_steps.titan("FSDP + TP + compile + async TP") is KNOWN["torchtitan-async-tp"]
    assert measured_steps.titan("FSDP") is KNOWN["torchtitan"]


def test_async_tensor_parallelism_needs_compiled_layers():
    assert as_run(TORCHTITAN_ASYNC_TP, gpt(), False) is TORCHTITAN_ASYNC_TP
    assert as_run(TORCHTITAN_ASYNC_TP, gpt(compile=False), False) is TORCHTITAN_EAGER
    machines, chosen = cluster(("h100", 1, 8)), layout([("h100", 1)], (8,), tensor=8, sequence_parallel=True)
    recipe = gpt(hidden=4096, heads=32, length=4096, precision="bf16")
    plain, hidden = (Predictor(recipe, machines, KNOWN[name]).parts(chosen).tensor for name in
                     ("torchtitan", "torchtitan-async-tp"))  # fmt: skip
    assert hidden < 0.6 * plain


def test_torchtitans_search_has_the_layouts_of_torchtitan():
    machines, recipe = cluster(("h100", 1, 4)), gpt(layers=4, length=4096, precision="bf16", batch=8)
    plans = search(recipe, machines, top=400, limits=SMALL, software=TORCHTITAN).plans
    layouts = [plan.layout for plan in plans]
    assert all(each.sequence_parallel for each in layouts if each.tensor > 1)
    assert all(each.zero in (2, 3) for each in layouts if each.data * each.context > 1)
    assert all(each.virtual == 2 for each in layouts if each.schedule == "zero-bubble")
    assert {each.tensor for each in layouts} == {1, 2, 4}
    assert {each.pipeline for each in layouts} == {1, 2, 4}
    assert 2 in {each.context for each in layouts}
    for each in layouts[::9]:
        given(with_(recipe, parallel=each.settings(), train={"micro_batch": each.micro_batch}), machines, TORCHTITAN)


def test_a_sequence_that_torchtitan_cannot_divide_has_no_tensor_parallelism():
    recipe = with_(gpt(layers=4, precision="bf16", batch=8), data={"sequence_length": 1022})
    found = search(recipe, cluster(("h100", 1, 4)), top=400, limits=SMALL, software=TORCHTITAN)
    assert {plan.layout.tensor for plan in found.plans} == {1, 2}


def test_deepspeeds_search_has_the_layouts_of_its_pipeline_engine():
    machines = cluster(("a100-40", 1, 2), ("t4", 1, 2))
    found = search(gpt(layers=5, batch=8), machines, top=400, limits=SMALL, software=DEEPSPEED)
    for plan in found.plans:
        assert (plan.layout.schedule, plan.layout.context, plan.layout.virtual) == ("1f1b", 1, 1)
        assert plan.layout.zero < 2
    assert any(len(set(plan.layout.partition)) > 1 for plan in found.plans)


@pytest.mark.parametrize(
    ("name", "parallel", "said"),
    [
        ("torchtitan", {"zero": 0}, "TorchTitan is predicted with ZeRO 2 or 3, not 0"),
        ("torchtitan", {"zero": 3, "tensor": 2}, "no tensor parallelism without sequence parallelism"),
        ("torchtitan", {"zero": 3, "recompute": 2}, "recomputation of 2 layers per stage"),
        ("torchtitan", {"zero": 2, "pipeline": 2, "schedule": "zero-bubble"}, "has 2 stages per rank, not 1"),
        ("torchtitan-async-tp", {"zero": 1}, "TorchTitan is predicted with ZeRO 2 or 3, not 1"),
        ("megatron", {"context": 2}, "Megatron-LM of 2021 to 2023 has no context parallelism"),
        ("megatron", {"zero": 2}, "predicted with ZeRO 0 or 1, not 2"),
        ("megatron", {"pipeline": 2, "schedule": "gpipe"}, "has no gpipe schedule"),
        ("megatron-deepspeed", {"zero": 3}, "Megatron-DeepSpeed is predicted with ZeRO 0 or 1, not 3"),
        ("megatron-deepspeed", {"pipeline": 2, "virtual": 2, "schedule": "interleaved"}, "no interleaved schedule"),
        ("megatron-deepspeed", {"zero": 1, "replicate": 2}, "has no hybrid sharding"),
    ],
)
def test_a_layout_that_a_program_lacks_is_refused_by_name(name, parallel, said):
    recipe = with_(gpt(length=2048, compile=False), parallel=parallel)
    with pytest.raises(UserError, match=said) as refused:
        given(recipe, cluster(("a100-80", 1, 4)), KNOWN[name])
    assert "--software steelyard" in refused.value.hint
    assert given(recipe, cluster(("a100-80", 1, 4))).plans  # Steelyard runs all of them.


@pytest.mark.parametrize("name", ["megatron", "megatron-deepspeed", "torchtitan", "torchtitan-async-tp"])
@pytest.mark.parametrize(
    ("optim", "said"),
    [({"offload": True}, "keeps its optimizer on the GPU"), ({"state": "int8"}, 'optim.state = "fp32", not "int8"'),
     ({"name": "muon"}, 'optim.name = "adamw"')],
)  # fmt: skip
def test_an_optimizer_that_other_programs_memory_has_no_term_for_is_refused(name, optim, said):
    for look in (search, given):
        with pytest.raises(UserError, match=said):
            look(with_(gpt(), optim=optim), cluster(("a100-80", 1, 1)), software=KNOWN[name])


def torchtitans(recipe: Recipe, zero: int):
    chosen = layout([("h100", 1)], (8,), data=8, zero=zero, recompute="full")
    return memory_fit.memories_of(Predictor(recipe, cluster(("h100", 1, 8)), TORCHTITAN), chosen, [0])[0]


def test_torchtitan_keeps_gathered_weights_under_zero_2_and_sums_shards_of_gradients():
    recipe = gpt(batch=8, precision="bf16", length=4096)
    two, three = torchtitans(recipe, 2), torchtitans(recipe, 3)
    parameters = three.weights / 1.08 / 4 * 8
    assert two.working_copies == pytest.approx(2 * 1.08 * parameters, rel=1e-4)
    assert three.working_copies < 0.5 * two.working_copies
    assert two.weights == three.weights
    several = torchtitans(gpt(batch=16, precision="bf16", length=4096), 3)
    assert several.gradients == three.gradients + several.weights


def test_replicas_of_hybrid_sharding_hold_larger_shards():
    recipe = gpt(batch=8, precision="bf16", length=4096)
    replicated = with_(recipe, parallel={"zero": 3, "data": 8, "replicate": 4})
    assert torchtitans(replicated, 3).weights == pytest.approx(4 * torchtitans(recipe, 3).weights, rel=1e-4)
