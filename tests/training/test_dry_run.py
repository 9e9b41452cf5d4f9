import pytest

from steelyard.core.errors import RuntimeFailure, UserError
from steelyard.core.recipe import Recipe, load_recipe
from steelyard.sizes.param_count import parameters
from steelyard.training.dry_run import as_result, as_text, dry_run, refuse_what_does_not_fit


@pytest.mark.parametrize("name", ["gpt2-small", "llama3.2-1b", "quickstart"])
@pytest.mark.parametrize("pipeline", [1, 2, 4])
def test_stages_of_meta_tensors_are_counted_as_sizes_counts_them(name, pipeline):
    recipe = load_recipe(name, [f"parallel.pipeline={pipeline}", "train.global_batch=64", "model.vocab_multiple=1"])
    plan = dry_run(recipe, gpu="80")
    second_table = recipe.model.vocab * recipe.model.hidden if recipe.model.tied and pipeline > 1 else 0
    assert sum(stage.parameters for stage in plan.stages) == parameters(recipe.model).total + second_table
    assert sum(len(stage.layers) for stage in plan.stages) == recipe.model.layers


@pytest.mark.parametrize("pipeline", [1, 2, 4])
@pytest.mark.parametrize("dense", [[], [0, 3]])
def test_stages_with_experts_are_counted_in_total_active_and_on_each_rank(pipeline, dense):
    model = {
        "family": "mixtral", "layers": 5, "hidden": 64, "heads": 4, "ffn": 96, "vocab": 128, "experts": 4,
        "dense_layers": dense, "shared_ffn": 32, "router_bias_rate": 0.001,
    }  # fmt: skip
    train, parallel = {"global_batch": 8, "device": "cpu"}, {"expert": 2, "pipeline": pipeline}
    plan = dry_run(Recipe.model_validate({"name": "moe", "model": model, "train": train, "parallel": parallel}))
    assert plan.world == 2 * pipeline  # The smallest that two expert ranks divide.
    size, experts = parameters(plan.recipe.model), (5 - len(dense)) * 4 * 3 * 64 * 96
    stages = plan.stages
    assert sum(stage.parameters for stage in stages) == size.total
    assert sum(stage.active for stage in stages) == size.total - experts // 2
    assert sum(stage.parameters - stage.parameters_per_rank for stage in stages) == experts // 2
    assert "active) parameters on" in as_text(plan)
    assert as_result(plan)["active_parameters"] == size.active


def test_a_70b_is_counted_without_its_weights():
    plan = dry_run(load_recipe("llama3.1-70b"), gpu="h100-80")
    assert plan.world == 16
    assert sum(stage.parameters for stage in plan.stages) == 70_553_706_496
    assert as_result(plan)["fits"] is False


def test_what_does_not_fit_is_named_with_what_would_help():
    plan = dry_run(load_recipe("llama3.2-1b"), gpu="24GiB")
    with pytest.raises(RuntimeFailure) as refused:
        refuse_what_does_not_fit(plan)
    assert "stage 0 needs" in refused.value.message
    assert "parallel.recompute=full would need" in refused.value.hint


def test_what_fits_is_not_refused_and_says_so():
    plan = dry_run(load_recipe("gpt2-small"), gpu="a100-40")
    refuse_what_does_not_fit(plan)
    text = as_text(plan)
    assert "fits: " in text
    assert "124M" in text
    assert as_result(plan)["fits"] is True


def test_without_a_device_it_says_what_is_needed():
    plan = dry_run(load_recipe("gpt2-small", ["train.device=cpu"]))
    refuse_what_does_not_fit(plan)
    assert plan.device is None
    assert as_text(plan).splitlines()[-1].startswith("needs ")
    assert as_result(plan)["fits"] is None


def test_kinds_sum_to_the_total():
    for rank in as_result(dry_run(load_recipe("llama3.1-70b"), world=64, gpu="80"))["ranks"]:
        assert sum(rank["bytes"].values()) == rank["total_bytes"]


@pytest.mark.parametrize("gpu", ["h10", "cpu", "80 bananas", ""])
def test_a_gpu_that_is_not_known_is_refused_with_those_that_are(gpu):
    with pytest.raises(UserError, match="unknown GPU") as refused:
        dry_run(load_recipe("gpt2-small"), gpu=gpu)
    assert "h100-80" in refused.value.hint


@pytest.mark.parametrize(("written", "bytes_"), [("80", 80 << 30), ("24GiB", 24 << 30), ("24 GB", 24 * 10**9)])
def test_memory_can_be_written_out(written, bytes_):
    assert dry_run(load_recipe("gpt2-small"), gpu=written).device.memory == bytes_


def test_memory_checkpoints_are_counted_in_host_memory_and_clones_on_the_device():
    recipe = load_recipe("llama3.2-1b", ["checkpoint.memory_every=20"])
    plain, one = dry_run(load_recipe("llama3.2-1b"), world=1), dry_run(recipe, world=1)
    state = 12 * parameters(recipe.model).total  # fp32 weights and AdamW's two moments
    assert (plain.memory[0].host, plain.memory[0].total) == (0, one.memory[0].total)
    assert as_result(one)["ranks"][0]["memory_checkpoint_bytes"] == 3 * state  # pinned, and two in tmpfs
    assert "(of these, memory checkpoints)" in as_text(one)
    # Two ranks write half of it each, and also keep the files of their peer. ZeRO shards the pinned copies as well.
    assert dry_run(recipe, world=2).memory[0].host == pytest.approx(state + 4 * state / 2, rel=1e-6)
    sharded = load_recipe("llama3.2-1b", ["checkpoint.memory_every=20", "parallel.zero=1"])
    assert dry_run(sharded, world=2).memory[0].host == pytest.approx(5 * state / 2, rel=1e-6)
    cloned = dry_run(load_recipe("llama3.2-1b", ["checkpoint.memory_every=20", "checkpoint.memory_device_gib=2"]), 1)
    assert cloned.memory[0].total == one.memory[0].total + 2 * 2**30
