"""`steelyard recipe scale`: sizes near the request, batch and learning rate by the Step Law, recipes that train."""

import json

import pytest

from steelyard import training
from steelyard.core.errors import UserError
from steelyard.core.recipe import load_recipe, to_toml
from steelyard.sizes.memory import memory_of
from steelyard.sizes.param_count import parameters
from steelyard.training.dry_run import dry_run
from steelyard.tune.scaled_recipe import ScaleRequest, batch_tokens, choose_config, learning_rate, scaled


@pytest.mark.parametrize("wanted", [20e6, 60e6, 124e6, 350e6, 1e9, 3e9, 7e9, 13e9, 70e9])
def test_a_model_has_the_parameters_that_were_asked_for_and_a_usual_shape(wanted):
    model = choose_config(int(wanted), 50257)
    assert parameters(model).total == pytest.approx(wanted, rel=0.03)
    assert model.hidden % model.heads == 0
    assert 30 < model.hidden / model.layers < 200


def test_the_shape_of_gpt2_small_is_found():
    model = choose_config(124_000_000, 50257)
    assert (model.layers, model.hidden, model.heads) == (12, 768, 12)


def test_learning_rate_and_batch_are_those_of_the_step_law():
    # 1e9 parameters and 1e11 tokens: 1.79 x 10^(-6.417 + 3.377), and 0.58 x 10^6.281.
    assert learning_rate(10**9, 10**11) == pytest.approx(1.79 * 10**-3.04)
    assert batch_tokens(10**11) == pytest.approx(0.58 * 10**6.281)
    assert learning_rate(10**5, 10**7) == 0.01


@pytest.mark.parametrize(("gpu", "gpus", "precision"), [("h200", 1, "bf16"), ("v100-32", 8, "fp16")])
def test_both_optimizers_see_the_tokens_and_fit_and_their_time_and_cost_are_predicted(gpu, gpus, precision):
    runs, reasons = scaled(ScaleRequest(124_000_000, 20, gpu=gpu, gpus=gpus, price_hour=2.0), "x")
    assert len(reasons) == 6
    for name, run in runs.items():
        recipe = load_recipe(dict(run.settings))
        train = recipe.train
        assert (recipe.optim.name, train.precision) == (name, precision)
        tokens = train.steps * train.global_batch * recipe.data.sequence_length
        assert tokens == pytest.approx(20 * parameters(recipe.model).total, rel=0.01)
        batch = train.global_batch * recipe.data.sequence_length
        assert 0.7 < batch / batch_tokens(tokens) < 1.42  # the nearest power of two
        assert max(memory.total for memory in memory_of(recipe, gpus)) < 141 * 2**30
        assert run.hours == pytest.approx(train.steps * run.step_seconds / 3600)
        assert run.cost == pytest.approx(2.0 * gpus * run.hours)
    assert runs["muon"].step_seconds > runs["adamw"].step_seconds
    assert runs["muon"].settings["optim"]["adamw_learning_rate"] == runs["adamw"].settings["optim"]["learning_rate"]


def test_what_cannot_be_scaled_is_refused_with_a_hint():
    with pytest.raises(UserError, match="no model with a vocabulary of 50257 has about 100k parameters"):
        scaled(ScaleRequest(100_000, 20), "x")
    with pytest.raises(UserError, match="no GPU abacus"):
        scaled(ScaleRequest(124_000_000, 20, gpu="abacus"), "x")


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_tiny_recipe_passes_the_dry_run_and_trains(in_workplace, optimizer):
    runs, _ = scaled(ScaleRequest(300_000, 20, vocab=128, sequence_length=16), "scaled")
    (in_workplace.path / "scaled.toml").write_text(to_toml(runs[optimizer].settings))
    here = ["train.precision=fp32", "train.device=cpu", "data.train=tokens_text_document"]
    recipe = load_recipe("scaled.toml", [*here, "train.steps=2", "optim.warmup_steps=0", "eval.batches=1"])
    assert dry_run(recipe, 1)
    run = training.run(recipe)
    assert [record["step"] for record in run.metrics() if "loss" in record][-1] == 2


def test_the_command_writes_the_recipe_of_the_optimizer(in_workplace):
    words = ["recipe", "scale", "--parameters", "124M", "--optimizer", "muon", "--out", "muon.toml", "--json"]
    done = in_workplace.steelyard(*words)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert load_recipe(str(in_workplace.path / "muon.toml")).optim.name == "muon"
    assert set(result["runs"]) == {"adamw", "muon"}
