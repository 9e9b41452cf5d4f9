"""What a run has learned can be used: seen by evaluation, written as a file, written as weights for any program."""

import shutil

import pytest
import torch

from steelyard import checkpoint
from steelyard.checkpoint.formats import open_source
from steelyard.checkpoint.formats.native import SteelyardSource
from steelyard.checkpoint.formats.write import Target, convert
from steelyard.core.errors import UserError
from steelyard.core.recipe import load_recipe
from steelyard.sparsity import gumbel, pruned_source
from steelyard.sparsity.mask_file import MaskFile
from steelyard.sparsity.patterns import Pattern
from steelyard.text import tokenizer as tokenizers
from tests.conftest import write_documents
from tests.sparsity.conftest import Place
from tests.sparsity.small import Held, answer
from tests.sparsity.test_masked_linear import records, saved_tensors


@pytest.fixture
def learned(place: Place) -> Place:
    place.learn("masks", "train.steps=6", "optim.learning_rate=0.02")
    return place


@pytest.mark.slow
def test_masks_are_exported_as_a_file_and_as_weights_with_zeros(learned: Place, capsys):
    code, reported, _ = answer(capsys, "mask", "export", "masks", "learned.mask")
    assert (code, reported["pattern"], reported["made_by"]["step"], reported["matrices"]) == (0, "2:4", 6, 14)
    packed, logits, base = MaskFile("learned.mask"), saved_tensors(checkpoint_of("masks")), open_source("base")
    code, reported, _ = answer(capsys, "mask", "export", "masks/checkpoints/step-00000006", "folder", "--format", "hf")
    assert (code, reported["format"]) == (0, "hf")
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
    assert (sparse["mask"], dense["mask"], base["mask"]) == ("masks/checkpoints/step-00000006", "none", None)
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
    assert pruned_source.opened("masks", moved_to="copy").step == 6
    learned.train("other", "train.steps=1")
    with pytest.raises(UserError, match="other weights"):
        pruned_source.opened("masks", moved_to="other")
    with pytest.raises(UserError, match="do not exist at nowhere") as asked:
        pruned_source.opened("masks", moved_to="nowhere")
    assert "--base PATH" in str(asked.value)


def test_a_run_brings_the_tokenizer_it_learned_with_where_its_base_has_none(place: Place, capsys):
    text = "\n".join(f"the weights of layer {number} stay or go" for number in range(50))
    tokenizer = tokenizers.train_byte_bpe(text.splitlines(), 280)
    tokenizer.save(place.path / "words")
    shape = ["model.vocab=280", "data.tokenizer=words"]
    convert(Held(load_recipe("tiny.toml", shape).model), place.path / "plain", Target("hf"))
    documents = [tokenizer.encode_batch([text])[0]] * 20
    write_documents(place.path / "words_text_document", documents, 280)
    place.learn("own", "train.init_from=plain", "train.steps=1", 'data.train=["words_text_document"]', *shape)
    seen = pruned_source.opened("own")
    assert seen.load_tokenizer().fingerprint == tokenizers.load_tokenizer("words").fingerprint
    capsys.readouterr()
    code, _, said = answer(capsys, "mask", "export", "own", "with-words", "--format", "hf")
    assert (code, "has no tokenizer" in said) == (0, False)
    assert tokenizers.load_tokenizer("with-words").fingerprint == tokenizer.fingerprint
    code, reported, _ = answer(capsys, "generate", "own", "--prompt", "the weights", "--max-tokens", "2")
    assert (code, reported["prompt"]) == (0, "the weights")


def test_a_tokenizer_can_be_named_for_weights_that_come_without(place: Place, capsys):
    tokenizers.train_byte_bpe(["stay or go"], 260).save(place.path / "words")
    convert(Held(load_recipe("tiny.toml", ["model.vocab=280"]).model), place.path / "plain", Target("hf"))
    place.learn("masks", "train.init_from=plain", "train.steps=1", "model.vocab=280")
    assert answer(capsys, "mask", "export", "masks", "learned.mask")[0] == 0
    for command in (
        ("mask", "export", "masks", "exported", "--format", "hf"),
        ("mask", "apply", "plain", "learned.mask", "applied"),
        ("export-sparse", "masks", "compressed"),
    ):
        code, reported, said = answer(capsys, *command, "--tokenizer", "words")
        assert (code, "has no tokenizer" in said) == (0, False), said
        assert tokenizers.load_tokenizer(reported["path"]).vocab_size == 260


def test_a_place_that_is_taken_is_refused_before_a_weight_is_read(learned: Place, capsys, monkeypatch):
    assert answer(capsys, "mask", "export", "masks", "learned.mask")[0] == 0
    (learned.path / "taken").write_text("mine")
    _refuse_reading(monkeypatch)
    _all_refuse(capsys, "taken", "already exists")
    _all_refuse(capsys, "taken/out", "cannot be written")


def _refuse_reading(monkeypatch) -> None:
    for each in (SteelyardSource, pruned_source.MaskedSource):
        monkeypatch.setattr(each, "tensor", lambda *_: pytest.fail("a weight was read"))


def _all_refuse(capsys, out: str, reported: str) -> None:
    for command in (
        ("mask", "export", "masks", out),
        ("mask", "export", "masks", out, "--format", "hf"),
        ("mask", "apply", "base", "learned.mask", out),
        ("export-sparse", "masks", out),
        ("prune", "base", out, "--method", "magnitude", "--save", "mask"),
    ):
        code, _, said = answer(capsys, *command)
        assert (code, reported in said) == (2, True), (command, said)


@pytest.mark.parametrize("method", ["learned", "fixed"])
def test_going_on_with_fewer_matrices_is_refused(learned: Place, method: str):
    words = ("train.init_from=masks", f"sparsity.method={method}", 'sparsity.include=["mlp"]')
    with pytest.raises(UserError, match=r"layers.0.attention.* would become dense again") as refused:
        learned.learn("narrower", *words)
    assert "sparsity.include" in str(refused.value.where)


def test_dense_weights_of_n_of_m_training_are_not_written_without_a_word(place: Place, capsys):
    place.train("nm", "sparsity.method=sr-ste", "train.steps=2", "eval.every=0", "checkpoint.every=0")
    code, _, said = answer(capsys, "checkpoint", "convert", "nm", "dense", "--to", "hf")
    assert (code, "mask export --format hf" in said) == (0, True)
    code, _, said = answer(capsys, "mask", "export", "nm", "sparse", "--format", "hf")
    assert (code, "dense" in said) == (0, False)
    weight = open_source("sparse").tensor("layers.1.mlp.up.weight")
    assert (weight.view(-1, 4) == 0).sum(1).eq(2).all()


def test_a_run_that_keeps_zeros_says_how_they_leave_it(place: Place, capsys):
    assert answer(capsys, "prune", "base", "pruned", "--method", "magnitude")[0] == 0
    place.train("kept", "sparsity.method=fixed", "train.init_from=pruned", "train.steps=1", "eval.every=0")
    code, _, said = answer(capsys, "mask", "export", "kept", "x.mask")
    assert (code, "checkpoint convert kept OUT --to hf" in said) == (2, True)


@pytest.mark.parametrize(
    ("words", "reported"),
    [
        (("mask", "export", "base", "x.mask"), "base has no masks"),
        (("mask", "export", "masks", "x.mask", "--tokenizer", "t"), "contains no tokenizer"),
        (("checkpoint", "convert", "masks", "x", "--to", "hf"), "mask export --format hf"),
    ],
)
def test_what_cannot_be_is_said_in_one_message(learned: Place, capsys, words: tuple, reported: str):
    code, _, said = answer(capsys, *words)
    assert code == 2
    assert reported in said
    assert "Traceback" not in said
