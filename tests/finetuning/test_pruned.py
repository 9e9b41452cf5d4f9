"""Tuning a pruned model: its zeros stay, in full and with adapters, unless they are not to."""

import shutil
from pathlib import Path

import pytest
import torch

from steelyard.core.errors import UserError
from steelyard.finetuning import peft_format, sft
from tests.finetuning.conftest import recipe_of

WORDS = ["train.steps=3", "train.global_batch=4", "optim.learning_rate=0.03", "finetune.valid_share=0.0"]
FIXED = "sparsity.method=fixed"


@pytest.fixture
def pruned(bases, place):
    """The base with every other weight of its layers' matrices gone: 2:4."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(bases / "llama", place / "pruned")
    weights = load_file(place / "pruned/model.safetensors")
    for name, weight in weights.items():
        if "proj" in name:
            weight[:, ::2] = 0
    save_file(weights, place / "pruned/model.safetensors", {"format": "pt"})
    return place / "pruned"


def tuned(base, *words):
    prepared = sft.prepare(recipe_of(base, *WORDS, *words))
    run = sft.run(prepared, Path("run"))
    sft.export(prepared, run, Path("out"))
    return run


def matrices(folder):
    from safetensors.torch import load_file

    return {name: weight for name, weight in load_file(Path(folder) / "model.safetensors").items() if "proj" in name}


@pytest.mark.parametrize("words", [[], ["finetune.adapter.rank=4"]], ids=["full", "lora"])
def test_zeros_stay_zeros_and_the_rest_moves(pruned, words):
    tuned(pruned, *words)
    before, after = matrices(pruned), matrices("out")
    assert all(torch.equal(before[name] == 0, after[name] == 0) for name in before)
    assert all((before[name] - after[name]).abs().max() > 1e-3 for name in before)


def test_the_loss_while_adapting_is_that_of_the_merged_model(pruned):
    run = tuned(pruned, FIXED, "finetune.adapter.rank=4", "finetune.valid_share=0.2", "eval.every=0")
    again = sft.prepare(recipe_of("out", *WORDS, "finetune.valid_share=0.2", "train.steps=1"))
    merged = sft.run(again, Path("again"))
    last = [record["valid_loss"] for record in run.metrics() if "valid_loss" in record][-1]
    assert merged.metrics()[0]["valid_loss"] == pytest.approx(last, rel=1e-5)


def test_zeros_are_filled_where_that_is_asked_for(pruned):
    with pytest.raises(UserError, match="DoRA would fill"):
        tuned(pruned, "finetune.adapter.kind=dora")
    tuned(pruned, "finetune.keep_zeros=false")
    assert not any((weight == 0).any() for weight in matrices("out").values())


def test_what_peft_cannot_say_is_refused(pruned):
    run = tuned(pruned, FIXED, "finetune.adapter.rank=4")
    with pytest.raises(UserError, match="PEFT's format does not support"):
        peft_format.export(run.path, Path("adapter"))
    with pytest.raises(UserError, match="only LoRA"):
        tuned(pruned, FIXED, "finetune.adapter.kind=dora")


@pytest.mark.parametrize("words", [["sparsity.method=sr-ste"], ["sparsity.method=learned"]], ids=["n of m", "learned"])
def test_what_is_tuned_under_masks_comes_out_under_them(bases, place, words):
    tuned(bases / "llama", *words)
    for weight in matrices("out").values():
        assert (weight.view(-1, 4) == 0).sum(1).eq(2).all()
