"""What a run has learned can be used: seen by evaluation, written as a file, written as weights for any program."""

import shutil

import pytest
import torch

from steelyard import checkpoint
from steelyard.checkpoint.formats import open_source
from steelyard.core.errors import UserError
from steelyard.sparsity import gumbel, source
from steelyard.sparsity.masks import MaskFile
from steelyard.sparsity.patterns import Pattern
from tests.sparsity.conftest import Place
from tests.sparsity.small import answer
from tests.sparsity.test_learned import records, saved_tensors


@pytest.fixture
def learned(place: Place) -> Place:
    place.learn("masks", "train.steps=6", "optim.learning_rate=0.02")
    return place


def test_masks_are_exported_as_a_file_and_as_weights_with_zeros(learned: Place, capsys):
    code, told, _ = answer(capsys, "mask", "export", "masks", "learned.mask")
    assert (code, told["pattern"], told["made_by"]["step"], told["matrices"]) == (0, "2:4", 6, 14)
    packed, logits, base = MaskFile("learned.mask"), saved_tensors(checkpoint_of("masks")), open_source("base")
    code, told, _ = answer(capsys, "mask", "export", "masks/checkpoints/step-00000006", "folder", "--format", "hf")
    assert (code, told["format"]) == (0, "hf")
    folder = open_source("folder")
    for name in packed.names():
        mask = gumbel.argmax_mask(logits[f"model.{name.removesuffix('weight')}mask_logits"], Pattern(2, 4).candidates())
        assert torch.equal(packed.mask(name), mask)
        assert torch.equal(folder.tensor(name), base.tensor(name) * mask)
    assert torch.equal(folder.tensor("layers.0.mlp_norm.weight"), base.tensor("layers.0.mlp_norm.weight"))
    code, _, _ = answer(capsys, "mask", "apply", "base", "learned.mask", "applied")
    assert code == 0
    assert torch.equal(open_source("applied").tensor("layers.1.mlp.up.weight"), folder.tensor("layers.1.mlp.up.weight"))


def checkpoint_of(run: str):
    return checkpoint.source(run).run


def test_evaluation_sees_a_run_through_its_masks_as_validation_does(learned: Place, capsys):
    words = ("eval", "ppl", "masks", "--data", "tokens_text_document", "--sequence-length", "16")
    _, sparse, _ = answer(capsys, *words)
    _, dense, _ = answer(capsys, *words, "--mask", "none")
    _, base, _ = answer(capsys, "eval", "ppl", "base", *words[3:])
    assert sparse["step"] == 6
    assert dense["loss"] == base["loss"]
    assert sparse["loss"] > dense["loss"] + 0.02
    assert sparse["loss"] == pytest.approx(records(checkpoint_of("masks"), "valid_loss")[-1], abs=0.3)


def test_a_moved_base_is_asked_for_and_another_refused(learned: Place, capsys):
    (learned.path / "base").unlink()
    original = (learned.path / "tiny.toml").resolve().parent / "base"
    state = checkpoint.source("masks").state["sparsity"]["base"]
    assert state["path"].startswith(str(original.resolve()))
    shutil.copytree(original, learned.path / "copy")
    assert source.opened("masks", moved_to="copy").step == 6
    learned.train("other", "train.steps=1")
    with pytest.raises(UserError, match="other weights"):
        source.opened("masks", moved_to="other")
    with pytest.raises(UserError, match="not at nowhere") as asked:
        source.opened("masks", moved_to="nowhere")
    assert "--base PATH" in str(asked.value)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("mask", "export", "base", "x.mask"), "base brings no masks"),
        (("checkpoint", "convert", "masks", "x", "--to", "hf"), "mask export --format hf"),
    ],
)
def test_what_cannot_be_is_said_in_one_message(learned: Place, capsys, words: tuple, told: str):
    code, _, said = answer(capsys, *words)
    assert code == 2
    assert told in said
    assert "Traceback" not in said
