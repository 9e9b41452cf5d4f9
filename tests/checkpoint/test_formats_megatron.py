"""Megatron checkpoints in a real GPTModel of megatron-core, on CPUs."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from steelyard.checkpoint.formats import open_source
from steelyard.checkpoint.formats.megatron_layout import MegatronLayout
from steelyard.checkpoint.formats.write import Target, convert
from tests import preloaded
from tests.checkpoint.gpt_model import TOKENS
from tests.checkpoint.models import SHAPES, Held, written

pytest.importorskip("megatron.core")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.slow
WORKER = Path(__file__).with_name("gpt_model.py")


def logits_of_megatron(folder: Path, tensor: int, control: str = "") -> torch.Tensor:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    out = folder / "logits.pt"
    ranks = [
        preloaded.Popen(
            [
                sys.executable,
                str(WORKER),
                str(folder),
                str(rank),
                str(tensor),
                port,
                str(out),
                *filter(None, [control]),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(tensor)
    ]
    said = [rank.communicate(timeout=600)[0] for rank in ranks]
    assert all(rank.returncode == 0 for rank in ranks), said[0][-3000:]
    logits: torch.Tensor = torch.load(out, weights_only=True)
    return logits[..., :100]


def logits_of_transformers(tmp_path: Path, name: str) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(written(tmp_path, name), dtype=torch.float32).eval()
    with torch.no_grad():
        logits: torch.Tensor = model(TOKENS).logits
    return logits


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("name", ["gpt", "llama-tied", "llama-3", "qwen2"])
def test_a_gptmodel_gives_the_logits_of_transformers(tmp_path, name, tensor):
    folder = written(tmp_path, name, "megatron", layout=MegatronLayout(tensor))
    expected = logits_of_transformers(tmp_path, name)
    torch.testing.assert_close(logits_of_megatron(folder, tensor), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("control", ["qkv", "gate"])
def test_a_wrong_order_would_show(tmp_path, control):
    folder = written(tmp_path, "llama-3", "megatron")
    expected = logits_of_transformers(tmp_path, "llama-3")
    assert (logits_of_megatron(folder, 1, control) - expected).abs().max() > 1


@pytest.mark.parametrize(("name", "tensor"), [("gpt", 1), ("llama-3", 2)])
def test_torch_dist_is_loaded_by_megatron_at_any_degree(tmp_path, name, tensor):
    folder = written(tmp_path, name, "megatron-dist")
    expected = logits_of_transformers(tmp_path, name)
    torch.testing.assert_close(logits_of_megatron(folder, tensor), expected, atol=1e-4, rtol=0)


def test_the_padding_of_the_vocabulary_repeats_the_last_row(tmp_path):
    convert(Held(SHAPES["llama"]), tmp_path / "m", Target("megatron", MegatronLayout(2)))
    rank = torch.load(tmp_path / "m/iter_0000001/mp_rank_01/model_optim_rng.pt", weights_only=False)
    table = rank["model"]["embedding.word_embeddings.weight"]
    assert table.shape == (128, 32)
    assert rank["args"].padded_vocab_size == 256
    assert torch.equal(table[0], table[-1])
    assert torch.equal(table[0], Held(SHAPES["llama"]).tensor("embed.weight")[99])
    assert open_source(tmp_path / "m").config.vocab == 100
