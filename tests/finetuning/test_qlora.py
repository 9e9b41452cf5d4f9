"""QLoRA: adapters over a base in 4 or 8 bits."""

import pytest
import torch

from steelyard import checkpoint
from steelyard.checkpoint.formats import open_source
from steelyard.core.errors import UserError
from steelyard.core.recipe import load_recipe
from steelyard.core.recipe.finetune_section import BasePrecision
from steelyard.finetuning import peft_format, sft
from steelyard.finetuning.lora_extension import LoraExtension
from steelyard.finetuning.quantized_base import QuantizedSource
from steelyard.model.quantization import ShardExtent, dequantize, quantize, shard_of
from steelyard.parallel.mesh import alone
from steelyard.sizes.memory import memory_of
from steelyard.sizes.memory_hints import remedies
from steelyard.training.dry_run import as_text, dry_run
from steelyard.training.engine import Engine
from tests.finetuning.conftest import recipe_of
from tests.finetuning.test_lora import WORDS, adapt, logits

NF4, DOUBLE, INT8 = "finetune.base_precision=nf4", "finetune.double_quant=true", "finetune.base_precision=int8"
DORA = "finetune.adapter.kind=dora"


def write_dequantized(folder, out, precision, double):
    """The base with every matrix of its layers quantized and dequantized, by way of transformers."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if ".layers." in name and weight.ndim == 2:
                rows, columns = weight.shape
                here = ShardExtent(0, 0, rows, columns, columns)
                quantized = quantize(weight, precision, double)
                weight.copy_(dequantize(shard_of(quantized, here), here, torch.float32))
    model.save_pretrained(out)


@pytest.mark.parametrize(
    "words",
    [pytest.param([NF4, DOUBLE, DORA], id="nf4 dora"), pytest.param([INT8], id="int8 lora", marks=pytest.mark.slow)],
)
def test_the_exported_model_is_the_adapter_over_the_dequantized_base(bases, place, words):
    peft = pytest.importorskip("peft")
    import transformers

    some = "finetune.adapter.targets=['query', 'up']"
    prepared, run = adapt(bases / "llama", some, *words)
    sft.export(prepared, run, place / "out")
    peft_format.export(run.path, place / "adapter")
    write_dequantized(bases / "llama", place / "base", "nf4" if NF4 in words else "int8", DOUBLE in words)
    ids = torch.randint(5, 390, (2, 20), generator=torch.Generator().manual_seed(0))
    base = transformers.AutoModelForCausalLM.from_pretrained(place / "base", dtype=torch.float32)
    with torch.no_grad():
        expected = peft.PeftModel.from_pretrained(base, place / "adapter").eval()(ids).logits
    assert (expected - logits(bases / "llama", ids)).abs().max() > 0.05
    torch.testing.assert_close(logits(place / "out", ids), expected, atol=2e-5, rtol=0)
    peft_format.merge(str(bases / "llama"), str(run.path), place / "merged")
    torch.testing.assert_close(logits(place / "merged", ids), expected, atol=2e-5, rtol=0)


@pytest.mark.slow
def test_training_computes_what_the_export_does(bases, place):
    prepared, run = adapt(bases / "llama", NF4, DORA, "finetune.valid_share=0.2", "eval.every=4")
    sft.export(prepared, run, place / "out")
    tuned = [record["valid_loss"] for record in run.metrics() if record.get("valid_loss") is not None]
    again = sft.prepare(recipe_of(place / "out", *WORDS, "train.steps=1", "finetune.valid_share=0.2", "eval.every=1"))
    full = sft.run(again, place / "full")
    assert full.metrics()[0]["valid_loss"] == pytest.approx(tuned[-1], rel=1e-5)


@pytest.mark.slow
def test_a_checkpoint_holds_adapters_alone_and_a_run_resumes_to_the_bit(bases, place):
    _, whole = adapt(bases / "llama", NF4, DOUBLE, DORA, run="whole")
    names = checkpoint.source(whole.path).shapes()
    assert not any("codes" in name or "absmax" in name for name in names)
    adapt(bases / "llama", NF4, DOUBLE, DORA, "train.steps=2", run="parts")
    with pytest.raises(UserError, match="is not that of the checkpoint"):
        sft.run(sft.prepare(recipe_of(bases / "llama", *WORDS, NF4, DORA)), place / "other", "parts")
    _, parts = adapt(bases / "llama", NF4, DOUBLE, DORA, run="parts")
    assert [each["loss"] for each in whole.metrics()] == [each["loss"] for each in parts.metrics()]
    ours, theirs = open_source(whole.path), open_source(parts.path)
    assert all(torch.equal(ours.tensor(name), theirs.tensor(name)) for name in ours.names())


def test_only_matrices_of_layers_are_quantized(bases):
    source = open_source(bases / "gpt")
    quantized = QuantizedSource(source, BasePrecision("nf4", False))
    changed = {name for name in source.names() if not torch.equal(source.tensor(name).float(), quantized.tensor(name))}
    assert changed == {f"layers.{n}.{path}.weight" for n in (0, 1) for path in (
        "attention.query", "attention.key", "attention.value", "attention.output", "mlp.up", "mlp.down"
    )}  # fmt: skip


@pytest.mark.parametrize("words", [[], [NF4], [NF4, DOUBLE, DORA], [INT8]], ids=["fp32", "nf4", "nf4 dora", "int8"])
def test_the_predicted_weights_are_those_of_the_model(bases, place, words):
    recipe = recipe_of(bases / "llama", *WORDS, *words)
    # With rows of 64 no block is stored twice.
    config = recipe.model.model_copy(update={"hidden": 64, "head_dim": 16, "ffn": 128})
    recipe = recipe.model_copy(update={"model": config})
    engine = Engine(recipe, alone(), torch.device("cpu"), LoraExtension(recipe), None)
    predicted = memory_of(recipe, 1)[0]
    held = sum(part.tensor.numel() * part.tensor.element_size() for part in engine.param_shards)
    trained = sum(part.tensor.numel() for part in engine.param_shards if part.parameter.requires_grad)
    assert predicted.weights == pytest.approx(held, rel=2e-3)
    assert predicted.gradients == 4 * trained
    precision = {"": "fp32", NF4: "nf4", INT8: "int8"}[words[0] if words else ""]
    assert f"frozen matrices in {precision}" in as_text(dry_run(recipe))
    if not words:
        assert "finetune.base_precision=nf4" in dict(remedies(recipe, 1, 1))


def test_an_8b_model_fits_in_16_gb():
    words = [
        "data.sequence_length=1024",
        "train.micro_batch=1",
        "train.global_batch=1",
        "finetune.data=['talks.jsonl']",
    ]
    recipes = [load_recipe("llama3.1-8b", [*words, "finetune.adapter.rank=16", *more]) for more in ([NF4], [])]
    quantized, plain = (memory_of(recipe, 1)[0].total for recipe in recipes)
    assert quantized < 16e9 < plain


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([NF4], "quantized weights cannot be trained"),
        ([INT8, DOUBLE, DORA], "needs the blocks of nf4"),
        ([NF4, DORA, "train.precision=fp8"], "do not support fp8"),
        ([NF4, DORA, "model.ffn=66", "parallel.tensor=2"], "stores pairs of weights"),
    ],
)
def test_what_cannot_be_quantized_is_refused(words, message):
    with pytest.raises(UserError, match=message):
        load_recipe("llama3.2-1b", ["finetune.data=['talks.jsonl']", *words])
