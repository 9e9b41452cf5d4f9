"""Adapters: PEFT computes what we do, merging is exact, and a checkpoint holds nothing that is frozen."""

import json
from pathlib import Path

import pytest
import torch

from steelyard import checkpoint
from steelyard.checkpoint.formats import open_source
from steelyard.checkpoint.formats.write import Target, convert
from steelyard.core.errors import UserError
from steelyard.evaluate.verify_checkpoint import verify_checkpoint
from steelyard.finetuning import peft_format, sft
from tests.finetuning.conftest import recipe_of

WORDS = ["train.steps=4", "train.global_batch=4", "optim.learning_rate=0.03", "finetune.adapter.rank=4",
         "finetune.valid_share=0.0", "checkpoint.every=1"]  # fmt: skip
SOME = "finetune.adapter.targets=['query', 'value', 'down']"


def adapt(base, *words, run="run"):
    prepared = sft.prepare(recipe_of(base, *WORDS, *words))
    return prepared, sft.run(prepared, Path(run))


def logits(folder, ids):
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(ids).logits


@pytest.mark.parametrize("words", [[], [SOME]], ids=["all", "some"])
@pytest.mark.parametrize("kind", ["lora", "dora"])
@pytest.mark.parametrize("family", ["llama", "gpt"])
def test_peft_loads_an_adapter_and_computes_what_the_merged_model_does(bases, place, family, kind, words):
    peft = pytest.importorskip("peft")
    import transformers

    prepared, run = adapt(bases / family, f"finetune.adapter.kind={kind}", *words)
    sft.export(prepared, run, place / "out")
    peft_format.export(run.path, place / "adapter")
    ids = torch.randint(5, 390, (2, 20), generator=torch.Generator().manual_seed(0))
    base = transformers.AutoModelForCausalLM.from_pretrained(bases / family, dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(base, place / "adapter").eval()
    with torch.no_grad():
        expected = theirs(ids).logits
    assert (expected - logits(bases / family, ids)).abs().max() > 0.05
    torch.testing.assert_close(logits(place / "out", ids), expected, atol=2e-5, rtol=0)
    peft_format.merge(str(bases / family), str(place / "adapter"), place / "merged")
    torch.testing.assert_close(logits(place / "merged", ids), expected, atol=2e-5, rtol=0)
    for name in ("out", "adapter", "merged"):
        found = verify_checkpoint(place / name)
        assert (found.problems, found.without_checksum) == ([], []), name


def test_an_adapter_that_peft_trained_is_merged_as_peft_merges_it(bases, place):
    peft = pytest.importorskip("peft")
    import transformers

    base = transformers.AutoModelForCausalLM.from_pretrained(bases / "llama", dtype=torch.float32)
    config = peft.LoraConfig(
        r=4, lora_alpha=6, target_modules=["q_proj", "down_proj"], use_rslora=True,
        alpha_pattern={r"layers\.0\..*down_proj": 3}, init_lora_weights=False, task_type="CAUSAL_LM",
    )  # fmt: skip
    theirs = peft.get_peft_model(base, config)
    theirs.save_pretrained(place / "theirs")
    peft_format.merge(str(bases / "llama"), str(place / "theirs"), place / "merged")
    merged = theirs.merge_and_unload().state_dict()
    ours = transformers.AutoModelForCausalLM.from_pretrained(place / "merged", dtype=torch.float32).state_dict()
    assert all(torch.allclose(ours[name], merged[name], atol=1e-6) for name in merged)


def test_a_checkpoint_holds_adapters_alone_and_a_run_goes_on_to_the_bit(bases, place):
    _, whole = adapt(bases / "llama", run="whole")
    names = checkpoint.source(whole.path).shapes()
    assert not any(name.startswith("model.") and "adapter" not in name for name in names)
    adapt(bases / "llama", "train.steps=2", run="parts")
    _, parts = adapt(bases / "llama", run="parts")
    assert [each["loss"] for each in whole.metrics()] == [each["loss"] for each in parts.metrics()]
    ours, theirs = open_source(whole.path), open_source(parts.path)
    assert all(torch.equal(ours.tensor(name), theirs.tensor(name)) for name in ours.names())


def test_training_begins_at_the_base_and_another_base_is_refused(bases, place, tmp_path):
    import shutil

    shutil.copytree(bases / "llama", place / "base")
    adapt("base", "train.steps=1", run="run")
    prepared = sft.prepare(recipe_of("base", *WORDS[1:], "train.steps=1"))
    full = sft.run(prepared, Path("full"))
    first = [json.loads(line)["loss"] for line in (place / "run/metrics.jsonl").open()]
    assert first[0] == pytest.approx(full.metrics()[0]["loss"], rel=1e-6)
    from safetensors.torch import load_file, save_file

    weights = load_file(place / "base/model.safetensors")
    weights["model.norm.weight"] += 1
    save_file(weights, place / "base/model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match="other weights"):
        adapt("base", run="run")
    with pytest.raises(UserError, match="other weights"):
        peft_format.merge("base", "run", place / "merged")
    with pytest.raises(UserError, match="contains only adapters"):
        convert(open_source("run"), place / "hf", Target("hf"))
    with pytest.raises(UserError, match="matches no matrix of this model family: gate"):
        adapt(bases / "gpt", "finetune.adapter.targets=['gate']", run="gpt")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type IA3"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"lora_alpha": "x"}, "not a valid adapter config"),
        ({"init_lora_weights": "pissa"}, "changes the base"),
    ],
)
def test_an_adapter_that_is_not_understood_is_refused(bases, place, change, message):
    _, run = adapt(bases / "llama", "train.steps=1")
    peft_format.export(run.path, place / "adapter")
    config = json.loads((place / "adapter/adapter_config.json").read_text())
    (place / "adapter/adapter_config.json").write_text(json.dumps(config | change))
    with pytest.raises(UserError, match=message):
        peft_format.merge(str(bases / "llama"), str(place / "adapter"), place / "merged")
    (place / "adapter/adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="does not match"):
        peft_format.merge(str(bases / "gpt"), str(place / "adapter"), place / "merged")
    assert not (place / "merged").exists()
