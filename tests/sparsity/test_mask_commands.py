"""Masks as a user handles them: looked at, applied, and seen through by eval and generate."""

import pytest
import torch

from steelyard.checkpoint.formats import open_source
from steelyard.checkpoint.formats.megatron_layout import MegatronLayout
from steelyard.checkpoint.formats.write import Target, convert
from steelyard.core.recipe.families.llama import LlamaConfig
from steelyard.text import tokenizer as tokenizers
from tests.checkpoint.models import assert_equal
from tests.sparsity.small import LENGTH, SAMPLES, Held, answer, write_text, written
from tests.sparsity.test_maskllm import maskllm

SHOWN = ("--samples", SAMPLES, "--sequence-length", LENGTH)


@pytest.fixture
def place(tmp_path, capsys):
    """A checkpoint, its weights pruned by wanda, and the same as a mask file."""
    text = write_text(tmp_path)
    source = written(tmp_path, "qwen2")
    for save, out in (("weights", "pruned"), ("mask", "wanda.mask")):
        words = ("--method", "wanda", "--calibration", text, "--save", save, *SHOWN)
        assert answer(capsys, "prune", source, tmp_path / out, *words)[0] == 0
    return tmp_path


def test_masks_applied_to_their_base_are_the_pruned_weights(place, capsys):
    code, result, _ = answer(capsys, "mask", "apply", place / "qwen2-hf", place / "wanda.mask", place / "applied")
    assert (code, result["format"]) == (0, "hf")
    assert_equal(open_source(place / "applied"), open_source(place / "pruned"))


def test_a_base_in_another_format_is_the_same_base(place, capsys):
    convert(open_source(place / "qwen2-hf"), place / "moved", Target("megatron", MegatronLayout(2)))
    assert answer(capsys, "mask", "apply", place / "moved", place / "wanda.mask", place / "applied")[0] == 0
    assert_equal(open_source(place / "applied"), open_source(place / "pruned"))


def test_another_base_is_refused(place, capsys):
    other = Held(open_source(place / "qwen2-hf").config, std=0.3)
    convert(other, place / "other", Target("hf"))
    code, _, said = answer(capsys, "mask", "apply", place / "other", place / "wanda.mask", place / "applied")
    assert (code, "the masks belong to other weights" in said) == (2, True)
    wider = written(place, "llama-wide-heads")
    code, _, said = answer(capsys, "mask", "apply", wider, place / "wanda.mask", place / "applied")
    assert (code, "in the masks, but" in said) == (2, True)
    assert not (place / "applied").exists()


def test_info_tells_pattern_size_base_and_method(place, capsys):
    code, result, _ = answer(capsys, "mask", "info", place / "wanda.mask")
    assert (code, result["pattern"], result["matrices"], result["sparsity"]) == (0, "2:4", 28, 0.5)
    assert result["base"]["path"] == str(place / "qwen2-hf")
    assert result["made_by"]["method"] == "wanda"
    code, _, said = answer(capsys, "mask", "info", place / "qwen2-hf" / "model.safetensors")
    assert (code, "this is not a mask file" in said) == (2, True)


def perplexity(capsys, checkpoint, *words):
    tokens = checkpoint.parent / "tokens"
    code, result, said = answer(capsys, "eval", "ppl", checkpoint, "--data", tokens, "--sequence-length", 16, *words)
    assert code == 0, said
    return result["perplexity"]


def test_perplexity_through_a_mask_is_that_of_the_pruned_weights(place, capsys):
    dense = perplexity(capsys, place / "qwen2-hf")
    assert perplexity(capsys, place / "qwen2-hf", "--mask", "none") == dense
    through = perplexity(capsys, place / "qwen2-hf", "--mask", place / "wanda.mask")
    assert through == perplexity(capsys, place / "pruned")
    assert abs(through - dense) > 1


def test_a_checkpoint_of_maskllms_is_measured_through_its_masks(tmp_path, capsys):
    write_text(tmp_path)
    held, _, masks = maskllm(tmp_path / "ckpt", "llama", MegatronLayout(2))
    for name, tensor in held.parameters.items():
        if name in masks:
            tensor.mul_(masks[name])
    convert(held, tmp_path / "masked", Target("hf"))
    assert perplexity(capsys, tmp_path / "ckpt") == perplexity(capsys, tmp_path / "masked")
    assert perplexity(capsys, tmp_path / "ckpt", "--mask", "none") != perplexity(capsys, tmp_path / "masked")


def test_generate_writes_through_a_mask(tmp_path, capsys):
    text = "\n".join(f"the weights of layer {number} stay or go" for number in range(200))
    (tmp_path / "text.txt").write_text(text)
    tokenizer = tokenizers.train_byte_bpe(text.splitlines(), 300)
    tokenizer.save(tmp_path / "tokenizer")
    shape = LlamaConfig(family="llama", layers=2, hidden=32, heads=4, ffn=48, vocab=tokenizer.vocab_size)
    source = tmp_path / "model"
    convert(Held(shape, std=0.4), source, Target("hf", tokenizer=str(tmp_path / "tokenizer")))
    words = ("--method", "sparsegpt", "--no-update-weights", "--calibration", tmp_path / "text.txt", *SHOWN)
    for save, out in (("weights", "pruned"), ("mask", "m.mask")):
        assert answer(capsys, "prune", source, tmp_path / out, *words, "--save", save)[0] == 0
    assert (tmp_path / "pruned" / "tokenizer.json").is_file()
    words = ("--prompt", "the weights", "--max-tokens", 12, "--temperature", 0)
    dense, through, pruned = (
        answer(capsys, "generate", *where, *words)[1]["text"]
        for where in ((source,), (source, "--mask", tmp_path / "m.mask"), (tmp_path / "pruned",))
    )
    assert through == pruned != dense


@pytest.mark.slow  # the import of transformers
def test_transformers_loads_what_was_pruned(place):
    import transformers

    network = transformers.AutoModelForCausalLM.from_pretrained(place / "pruned")
    weight = network.model.layers[3].mlp.down_proj.weight
    assert (weight.view(-1, 4) == 0).sum(1).eq(2).all()
    ours = open_source(place / "pruned").tensor("layers.3.mlp.down.weight")
    assert torch.equal(weight.data, ours)
