"""A small model of transformers' own, with a tokenizer, and conversations for it."""

import json
import random

import pytest
import torch

from steelyard.text.tokenizer.train_tokenizer import train_byte_bpe

WORDS = ["red", "blue", "green", "one", "two", "three", "cat", "dog", "fish", "sun", "moon"]
SPECIALS = ["<|im_start|>", "<|im_end|>"]
VOCAB = 400


def talks(number, seed=0):
    chance = random.Random(seed)
    rows = []
    for _ in range(number):
        turns = []
        for _ in range(chance.randint(1, 3)):
            said = chance.sample(WORDS, chance.randint(1, 6))
            turns.append({"role": "user", "content": "Say " + " ".join(said)})
            turns.append({"role": "assistant", "content": " ".join(reversed(said))})
        rows.append({"messages": turns})
    return rows


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


@pytest.fixture(scope="session")
def bases(tmp_path_factory):
    pytest.importorskip("transformers")
    return write_bases(tmp_path_factory.mktemp("bases"))


def write_bases(folder):
    """Folders of transformers' models by family, which learn nothing but are all there."""
    import transformers

    configs = {
        "llama": transformers.LlamaConfig(
            hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            vocab_size=VOCAB, max_position_embeddings=256, attention_bias=False,
        ),
        "gpt": transformers.GPT2Config(
            n_embd=32, n_layer=2, n_head=4, vocab_size=VOCAB, n_positions=256, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
        ),
    }  # fmt: skip
    return _written(folder, configs)


def _written(folder, configs):
    import transformers

    tokenizer = train_byte_bpe([json.dumps(row) for row in talks(100)], VOCAB, SPECIALS)
    for name, config in configs.items():
        torch.manual_seed(1)
        config.bos_token_id = config.eos_token_id = None
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder / name)
        tokenizer.save(folder / name)
    return folder


@pytest.fixture(scope="session")
def expert_bases(tmp_path_factory):
    """Folders of models with experts. One has a dense layer too."""
    transformers = pytest.importorskip("transformers")
    sizes = {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "vocab_size": VOCAB, "max_position_embeddings": 256, "num_experts_per_tok": 2, "initializer_range": 0.1,
    }  # fmt: skip
    qwen = {"moe_intermediate_size": 24, "num_experts": 4, "head_dim": 16, "mlp_only_layers": [0]}
    configs = {
        "mixtral": transformers.MixtralConfig(**sizes, intermediate_size=48, num_local_experts=4),
        "qwen3-moe": transformers.Qwen3MoeConfig(**sizes, **qwen, intermediate_size=64),
    }
    return _written(tmp_path_factory.mktemp("experts"), configs)


@pytest.fixture
def place(tmp_path, monkeypatch):
    """An empty folder to stand in, with conversations."""
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "talks.jsonl", talks(40))
    return tmp_path


def recipe_of(base, *words, data="talks.jsonl"):
    from steelyard.cli.sft import recipe_for

    usual = ["finetune.template=chatml", "data.sequence_length=64", "train.device=cpu", "eval.every=0", "log.every=1",
             "optim.warmup_steps=0", "optim.schedule=constant"]  # fmt: skip
    return recipe_for(None, [*usual, *words], str(base), [data])
