"""Joint training: weights outside the masks fall to exactly zero while the others learn from the dense model."""

import shutil

import pytest
import torch

from steelyard.checkpoint.formats import open_source
from steelyard.core.errors import UserError
from steelyard.core.recipe import load_recipe
from steelyard.parallel import mesh
from steelyard.sparsity import mask_file, pruned_source
from steelyard.sparsity.joint_training import JointTraining
from steelyard.sparsity.mask_sources import masked_checkpoint
from steelyard.sparsity.patterns import Pattern
from steelyard.sparsity.target_modules import maskable
from steelyard.training.engine import Engine
from tests.sparsity.conftest import Place
from tests.sparsity.test_masked_linear import magnitude_masks, records

JOINT = (
    "sparsity.method=joint", "sparsity.mask_every=2", "train.init_from=base", "eval.every=0", "checkpoint.every=0",
    "optim.warmup_steps=0", "log.every=1", "sparsity.distill=0",
)  # fmt: skip
DISTILL = ("sparsity.distill=1.0",)


def assert_two_of_four(path) -> None:
    source = open_source(path)
    masks = masked_checkpoint(path).masks
    assert len(masks.names()) == 14
    for name in masks.names():
        kept = source.tensor(name) != 0
        assert Pattern(2, 4).follows(kept)
        assert torch.equal(kept, masks.mask(name))


def test_every_group_is_two_of_four_at_the_end_and_not_before(place: Place):
    run = place.train("joint", *JOINT, *DISTILL, "train.steps=12")
    assert_two_of_four(run.path)
    scales, zeros = records(run, "mask_scale"), records(run, "zeros")
    assert scales == pytest.approx([5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6] + [0] * 7)
    assert zeros == [0] * 5 + [0.5] * 7
    assert any(records(run, "mask_changed")[:6])
    assert not any(records(run, "mask_changed")[6:])
    assert records(run, "distill_loss")[0] == 0  # The first step has the weights of the dense model.
    assert all(value > 0 for value in records(run, "distill_loss")[1:])


@pytest.mark.slow
def test_a_joint_run_resumes_exactly_before_and_after_the_masks_stay(place: Place):
    settings = (*JOINT, *DISTILL, "sparsity.mask_every=3", "train.steps=8")
    whole = place.train("whole", *settings, "checkpoint.every=1", "checkpoint.keep_last=99")
    for step in (2, 5):  # between two choices of the masks, and after the last
        first = place.path / f"resumed-{step}"
        shutil.copytree(whole.path, first)
        later = [path for path in (first / "checkpoints").iterdir() if int(path.name.rpartition("-")[2]) > step]
        assert len(later) == 8 - step
        for path in later:
            shutil.rmtree(path)
        run = place.train(first.name, *settings, "checkpoint.every=1", "checkpoint.keep_last=99")
        for key in ("loss", "grad_norm", "distill_loss", "zeros", "mask_changed", "mask_scale"):
            assert records(run, key) == records(whole, key)
        ours, theirs = open_source(run.path), open_source(whole.path)
        assert all(torch.equal(ours.tensor(name), theirs.tensor(name)) for name in ours.names())


@pytest.mark.slow
def test_joint_training_ends_below_fine_tuning_under_a_one_shot_mask(place: Place):
    place.train("dense", "train.steps=150", "eval.every=0", "checkpoint.every=0")
    source, pattern = open_source("dense"), Pattern(1, 4)
    largest = [(name, pattern.keep_best(source.tensor(name).abs())) for name in maskable(source.config)]
    mask_file.write(place.path / "largest.mask", largest, pattern, {})
    settings = ("train.init_from=dense", "train.steps=24", "optim.learning_rate=3e-3")
    only = [word for word in JOINT if not word.startswith("sparsity.")]
    fixed = place.train("fixed", *only, *settings, "sparsity.method=fixed", "sparsity.mask=largest.mask")
    joint = place.train("joint", *JOINT, *DISTILL, *settings, "sparsity.mask_every=4", "sparsity.pattern=1:4")
    below, above = (records(run, "valid_loss")[-1] for run in (joint, fixed))
    assert below < above - 0.02


@pytest.mark.slow
def test_the_masks_of_a_file_stay_and_a_stopped_run_is_seen_through_them(place: Place):
    chosen = magnitude_masks(place)
    run = place.train("joint", *JOINT, "train.steps=2", "sparsity.freeze_after=1.0", "sparsity.mask=magnitude.mask")
    source = open_source(run.path)
    assert all(torch.equal(source.tensor(name) != 0, mask) for name, mask in chosen.items())
    place.train("short", *JOINT, "train.steps=4", "sparsity.freeze_after=1.0", "checkpoint.every=2")
    early = place.path / "short" / "checkpoints" / "step-00000002"
    assert "before the masked weights" in open_source(early).remark
    dense, seen = open_source(early).tensor("layers.0.mlp.up.weight"), pruned_source.opened(early)
    assert dense.count_nonzero() == dense.numel()
    assert Pattern(2, 4).follows(seen.tensor("layers.0.mlp.up.weight") != 0)
    assert not open_source(place.path / "short").remark


@pytest.mark.slow
def test_another_teacher_than_that_of_the_checkpoint_is_refused(place: Place):
    place.train("joint", *JOINT, *DISTILL, "train.steps=2")
    other = place.train("other", "train.steps=1", "checkpoint.every=0", "train.seed=7")
    with pytest.raises(UserError, match="other weights"):
        place.train("joint", *JOINT, *DISTILL, "train.steps=3", f"sparsity.base={other.path}")


def test_masks_keep_the_weights_whose_columns_have_the_larger_gradient(place: Place):
    recipe = load_recipe(place.recipe, (*JOINT, "train.precision=fp32"))
    joint = JointTraining(recipe)
    engine = Engine(recipe, mesh.alone(), torch.device("cpu"), joint, None)
    part = joint.param_shards[0]
    with torch.no_grad():
        part.tensor[:] = torch.tensor([4.0, 3.0, 2.0, 1.0]).repeat(part.shape[1] // 4)
    part.parameter.grad = torch.ones_like(part.parameter) * torch.tensor([1.0, 1, 1, 9]).repeat(part.shape[1] // 4)
    joint.begin_step(1, 4, 1.0)
    joint.before_update(engine)
    joint.after_update(engine)
    kept = torch.tensor([True, False, False, True]).repeat(part.shape[1] // 4)
    assert (joint.kept[part] == kept).all()
    part.parameter.grad.fill_(torch.nan)  # a step that is skipped
    joint.begin_step(10, 4, 1.0)
    joint.before_update(engine)
    assert torch.isfinite(joint.columns[part]).all()
