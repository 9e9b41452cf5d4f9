"""Masks are learned in the one training loop: weights stay, logits move, and what they mean survives everything."""

import os
import shutil
import signal
import time

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from steelyard import checkpoint, model
from steelyard.checkpoint.formats import open_source
from steelyard.checkpoint.formats.megatron_layout import MegatronLayout
from steelyard.core.errors import UserError
from steelyard.core.recipe.families.llama import LlamaConfig
from steelyard.core.recipe.sparsity_section import SparsitySection
from steelyard.core.run import Run
from steelyard.sparsity import gumbel, mask_file, masked_linear
from steelyard.sparsity.patterns import Pattern
from steelyard.sparsity.target_modules import maskable
from tests.sparsity.conftest import LEARN, Place
from tests.sparsity.test_maskllm import maskllm

TWO_OF_FOUR = Pattern(2, 4)


def records(run: Run, key: str) -> list[float]:
    return [record[key] for record in run.metrics() if key in record]


def curve(run: Run) -> list[dict]:
    """What every layout and every resumed run must repeat."""
    keys = ("step", "loss", "grad_norm", "valid_loss", "mask_max_probability", "mask_changed", "mask_from_prior")
    return [{key: record[key] for key in keys if key in record} for record in run.metrics()]


def saved_tensors(run: Run, beginning: str = "model.") -> dict[str, Tensor]:
    saved = checkpoint.source(run.path)
    tensors = {
        name: torch.empty(shape, dtype=dtype)
        for name, (shape, dtype) in saved.tensors().items()
        if name.startswith(beginning)
    }
    checkpoint.load(saved, tensors)
    return tensors


def magnitude_masks(place: Place, path: str = "magnitude.mask") -> dict[str, Tensor]:
    """A mask file of the largest weights."""
    source = open_source(place.path / "base")
    chosen = {
        name: TWO_OF_FOUR.keep_best(source.tensor(name).abs())
        for name in source.names()
        if name.startswith("layers.") and len(source.sizes()[name]) == 2
    }
    mask_file.write(place.path / path, chosen.items(), TWO_OF_FOUR, {})
    return chosen


@pytest.mark.slow
def test_learning_masks_lowers_the_loss_of_the_pruned_model(place: Place):
    run = place.learn("masks", "train.steps=40", "optim.learning_rate=0.02")
    valid = records(run, "valid_loss")
    assert valid[-1] < valid[0] - 0.1
    certain, away = records(run, "mask_max_probability"), records(run, "mask_from_prior")
    assert certain[-1] > certain[0]
    assert away[-1] > 0.05
    assert all(0 <= changed <= 1 for changed in records(run, "mask_changed"))
    temperature, scale = records(run, "temperature"), records(run, "scale")
    assert (temperature[-1], scale[-1]) == (0.05, 5e2)
    assert temperature[0] == pytest.approx(4 - (4 - 0.05) / 39)


def test_a_checkpoint_holds_logits_and_the_name_of_the_base_and_no_weight_of_it(place: Place):
    run = place.learn("masks", "train.steps=2")
    saved = checkpoint.source(run.path)
    kinds = {name.split(".")[0] + "/" + name.split(".")[-1] for name in saved.shapes()}
    logits = {"model/mask_logits", *(f"optimizer/{entry}" for entry in ("step", "exp_avg", "exp_avg_sq"))}
    assert kinds == logits | {"masks/last", "masks/prior"}
    known = saved.state["sparsity"]["base"]
    assert known["path"] == str((place.path / "base/checkpoints/step-00000030").resolve())
    assert len(known["sha256"]) == 64


def test_a_prior_is_where_learning_begins_and_validation_sees_it(place: Place):
    chosen = magnitude_masks(place)
    run = place.learn("masks", "train.steps=1", "sparsity.prior=magnitude.mask", "optim.learning_rate=1e-9")
    tensors, candidates = saved_tensors(run), TWO_OF_FOUR.candidates()
    same = [
        (gumbel.argmax_mask(tensors[f"model.{name.removesuffix('weight')}mask_logits"], candidates) == mask).float()
        for name, mask in chosen.items()
    ]
    assert torch.cat([each.flatten() for each in same]).mean() > 0.95
    assert 0 < records(run, "mask_from_prior")[0] < 0.1


def test_zeros_of_the_weights_are_a_prior_and_dense_weights_are_none(place: Place):
    with pytest.raises(UserError, match="they have none") as refused:
        place.learn("masks", "train.steps=1", "sparsity.prior=weights")
    assert "sparsity.prior" in str(refused.value)


def test_going_on_from_learned_masks_adds_no_prior(place: Place):
    magnitude_masks(place)
    first = place.learn("first", "train.steps=4", "sparsity.prior=magnitude.mask")
    again = ("train.steps=1", "optim.learning_rate=1e-9", "train.init_from=first", "sparsity.temperature=[2.0, 0.05]")
    second = place.train("second", *LEARN, "sparsity.prior=magnitude.mask", *again)
    before, after = saved_tensors(first), saved_tensors(second)
    assert all(torch.allclose(before[name], after[name], atol=1e-6) for name in before)
    assert records(second, "valid_loss")[0] == records(first, "valid_loss")[-1]
    assert checkpoint.source(second.path).state["sparsity"] == checkpoint.source(first.path).state["sparsity"]


def test_maskllms_logits_are_gone_on_from(place: Place):
    _, logits, _ = maskllm(place.path / "theirs", "llama", MegatronLayout(2))
    model = "model={family='llama', layers=4, hidden=32, heads=4, ffn=48, vocab=100}"
    steps = ("train.steps=1", "optim.learning_rate=1e-9", "train.init_from=theirs")
    run = place.train("ours", *LEARN, model, *steps, "sparsity.prior=weights")
    found = saved_tensors(run)
    assert len(found) == len(logits)
    for name, expected in logits.items():
        assert torch.allclose(found[f"model.{name.removesuffix('weight')}mask_logits"], expected, atol=1e-6)
    assert records(run, "mask_from_prior") == [0.0]
    with pytest.raises(UserError, match="no 1:4 logits"):
        place.train("other", *LEARN, model, *steps, "sparsity.pattern=1:4")


def test_maskllms_masks_without_logits_are_begun_near(place: Place):
    maskllm(place.path / "theirs", "llama", MegatronLayout(2), with_gates=False)
    model = "model={family='llama', layers=4, hidden=32, heads=4, ffn=48, vocab=100}"
    run = place.train("ours", *LEARN, model, "train.steps=1", "optim.learning_rate=1e-9", "train.init_from=theirs")
    assert 0 < records(run, "mask_from_prior")[0] < 0.1


def test_a_moved_base_is_asked_for_and_another_one_refused(place: Place):
    (place.path / "base").unlink()
    shutil.copytree(place.path.joinpath("tiny.toml").resolve().parent / "base", place.path / "base")
    run = place.learn("masks", "train.steps=1")
    shutil.move(place.path / "base", place.path / "moved")
    with pytest.raises(UserError, match="do not exist at") as asked:
        place.learn("masks", "train.steps=2")
    assert "sparsity.base=PATH" in str(asked.value)
    place.learn("masks", "train.steps=2", "sparsity.base=moved")
    assert len(records(run, "loss")) == 2
    other = place.train("other", "train.steps=1", "checkpoint.every=0")
    with pytest.raises(UserError, match="belong to other weights"):
        place.learn("masks", "train.steps=3", f"sparsity.base={other.path}")


def test_hard_masks_and_one_of_four_and_chosen_layers_learn_too(place: Place):
    settings = ["sparsity.hard=true", "sparsity.pattern=1:4", 'sparsity.exclude=["layers.0.*", "*.attention.*"]']
    run = place.learn("masks", "train.steps=10", "optim.learning_rate=0.05", *settings)
    tensors = saved_tensors(run)
    assert {name.split(".")[2] for name in tensors} == {"1"}
    assert all(tensor.shape[-1] == 4 and "mlp" in name for name, tensor in tensors.items())
    assert records(run, "valid_loss")[-1] < records(run, "valid_loss")[0]


def test_logits_have_a_pace_of_their_own(place: Place):
    settings = ("train.steps=1", "optim.schedule=constant", "optim.weight_decay=0.5", "optim.learning_rate=1e-3")
    start = saved_tensors(place.learn("start", *settings, "sparsity.learning_rate=1e-12"))
    plain = saved_tensors(place.learn("plain", *settings))
    quick = saved_tensors(place.learn("quick", *settings, "sparsity.learning_rate_multiplier=10.0"))
    own = saved_tensors(place.learn("own", *settings, "sparsity.learning_rate=1e-2"))
    for name, tensor in start.items():
        moved = (quick[name] - tensor).norm() / (plain[name] - tensor).norm()
        assert moved == pytest.approx(10, rel=1e-3)
        assert torch.equal(own[name], quick[name])


def test_nothing_left_to_mask_is_refused(place: Place):
    with pytest.raises(UserError, match="no matrix remains"):
        place.learn("masks", 'sparsity.exclude=["*"]')


def test_a_run_that_goes_on_from_a_checkpoint_learns_the_same_to_the_bit(place: Place):
    settings = ("train.steps=6", "checkpoint.every=3", "log.every=2", "optim.warmup_steps=1")
    whole = place.learn("whole", *settings)
    second = place.learn("second", *settings, resume=str(whole.checkpoints / "step-00000003"))
    assert curve(second) == [record for record in curve(whole) if record["step"] > 3]
    ours, theirs = saved_tensors(second, ""), saved_tensors(whole, "")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.slow
def test_a_killed_run_learns_the_same_masks_to_the_bit(place: Place):
    words = ["train", "tiny.toml", *LEARN, "train.init_from=base", "train.steps=12", "checkpoint.every=1"]
    undisturbed = place.learn("undisturbed", "train.steps=12", "checkpoint.every=1")
    run = place.start(*words, "--run", "killed")
    steps = place.path / "killed" / "checkpoints"
    deadline = time.monotonic() + 300
    while not (steps / "step-00000004").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    os.killpg(run.pid, signal.SIGKILL)
    run.communicate(timeout=150)
    resumed = place.learn("killed", "train.steps=12", "checkpoint.every=1")
    assert curve(resumed) == curve(undisturbed)
    ours, theirs = saved_tensors(resumed, ""), saved_tensors(undisturbed, "")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_a_layer_computed_again_draws_what_it_drew(place: Place, recompute: str):
    plain = place.learn("plain", "train.steps=3")
    again = place.learn("again", "train.steps=3", f"parallel.recompute={recompute}")
    assert records(again, "grad_norm") == records(plain, "grad_norm")


@pytest.mark.slow
def test_compiled_layers_share_their_graphs():
    """The first layer has an input without gradient; all others are alike. A graph for each would end in none."""
    shape = LlamaConfig(family="llama", layers=10, hidden=32, heads=4, vocab=97)
    network = model.build(shape)
    model.init_weights(network, seed=1, std=0.02, layers=10)
    masked_linear.freeze(network)
    anneal = masked_linear.anneal_state_of(SparsitySection(method="learned"), torch.device("cpu"))
    masked_linear.put_masks(network, maskable(shape), 1, anneal)
    torch._dynamo.reset()
    graphs = CompileCounter()
    for layer in network.layers.values():
        layer._compiled_call_impl = torch.compile(layer._call_impl, backend=graphs)
    for step in range(2):
        tokens = torch.full((1, 16), step)
        network(model.Batch(tokens, tokens, sample_ids_B=torch.tensor([step]))).sum().backward()
    torch._dynamo.reset()
    assert graphs.frame_count == 2
