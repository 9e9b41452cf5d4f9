"""Current families through the rest of the product: adapters as PEFT computes them, pruning, perplexity."""

import json

import pytest
import torch

from steelyard.checkpoint.formats import open_source
from steelyard.finetuning import peft_format, sft
from steelyard.sparsity.target_modules import maskable
from steelyard.text.tokenizer.train_tokenizer import train_byte_bpe
from tests.checkpoint.test_families import CASES
from tests.finetuning.conftest import SPECIALS, VOCAB, talks
from tests.finetuning.test_lora import adapt, logits
from tests.sparsity.small import answer

NEW = ["mistral, window", "qwen3", "gemma2", "gemma3", "olmo2", "smollm3"]
pytestmark = pytest.mark.slow


@pytest.fixture(params=NEW, ids=lambda name: name.split(",")[0])
def base(request, tmp_path):
    transformers = pytest.importorskip("transformers")
    name, fields = CASES[request.param]
    torch.manual_seed(0)
    config = getattr(transformers, name)(**fields | {"vocab_size": VOCAB, "num_hidden_layers": 2})
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path / "base")
    train_byte_bpe([json.dumps(row) for row in talks(100)], VOCAB, SPECIALS).save(tmp_path / "base")
    return tmp_path / "base"


def test_an_adapter_is_what_peft_computes(base, place):
    peft = pytest.importorskip("peft")
    import transformers

    prepared, run = adapt(base)
    sft.export(prepared, run, place / "out")
    peft_format.export(run.path, place / "adapter")
    ids = torch.randint(5, 390, (2, 20), generator=torch.Generator().manual_seed(0))
    whole = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with torch.no_grad():
        expected = peft.PeftModel.from_pretrained(whole, place / "adapter").eval()(ids).logits
    assert (expected - logits(base, ids)).abs().max() > 0.01
    assert (
        logits(place / "out", ids) - expected
    ).abs().max() < 1e-4 * expected.abs().max()  # Norms after blocks amplify rounding.


def test_it_is_pruned_and_scored(base, place, capsys):
    (place / "text.txt").write_text("one two three red blue green\n" * 200)
    words = ["--method", "wanda", "--calibration", "text.txt", "--samples", "4", "--sequence-length", "32"]
    code, report, _ = answer(capsys, "prune", str(base), "pruned", *words)
    assert (code, report["sparsity"]) == (0, 0.5)
    pruned = open_source(place / "pruned")
    for name in maskable(pruned.config):
        assert ((pruned.tensor(name).reshape(-1, 4) == 0).sum(1) == 2).all()
    code, scored, _ = answer(capsys, "eval", "ppl", "pruned", "--data", "text.txt")
    assert code == 0
    assert 1 < scored["perplexity"] < 10 * VOCAB
