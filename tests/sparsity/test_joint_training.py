"""Joint training: weights outside the masks fall to exactly zero while the others learn from the dense model."""

import shutil

import pytest
import torch

from steelyard.checkpoint.formats import open_source
from steelyard.core.errors import UserError
from steelyard.sparsity import mask_file, pruned_source
from steelyard.sparsity.mask_sources import carried
from steelyard.sparsity.patterns import Pattern
from tests.sparsity.conftest import Place
from tests.sparsity.test_masked_linear import magnitude_masks, records

JOINT = (
    "sparsity.method=joint", "sparsity.mask_every=2", "train.init_from=base", "eval.every=0", "checkpoint.every=0",
    "optim.warmup_steps=0", "log.every=1",
)  # fmt: skip
DISTILL = ("sparsity.distill=1.0",)


def assert_two_of_four(path) -> None:
    source = open_source(path)
    masks = carried(path).masks
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
