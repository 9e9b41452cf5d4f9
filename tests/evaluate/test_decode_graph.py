"""Decoding with constant shapes: on a GPU with its kernels and CUDA graphs, otherwise in plain torch."""

import pytest
import torch

from steelyard.core.recipe import load_recipe
from steelyard.evaluate.decode_graph import Decoder
from steelyard.evaluate.join_projections import join_projections
from steelyard.evaluate.load_model import loaded
from steelyard.model import Batch, Cache, LanguageModel
from steelyard.sparsity import sparse_linear
from steelyard.sparsity.random_source import RandomCompressed

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
SMALL = ["model.layers=2", "model.hidden=128", "model.heads=4", "model.head_dim=32", "model.ffn=256", "model.vocab=500"]
SHAPES = ["llama3.2-1b", "qwen3-0.6b", "gemma3-1b", "olmo2-1b", "smollm3-3b"]


def small(shape):
    config = load_recipe(shape, [*SMALL, "model.kv_heads=2"]).model
    torch.manual_seed(0)
    network = LanguageModel(config)
    for weight in network.parameters():
        torch.nn.init.normal_(weight, std=0.1)
    for name, weight in network.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(weight, 0.5, 1.5)
    return network.to(DEVICE, DTYPE).requires_grad_(False).eval()


def decoded(network, tokens_BL, prompt=20):
    """The logits after each token from the prompt's last on, one token at a time."""
    cache = Cache(tokens_BL.shape[1])
    with torch.inference_mode():
        found = [network(Batch(tokens_BL[:, :prompt], logits_to_keep=1), cache=cache)[:, -1].clone()]
        decoder = Decoder(network, cache, len(tokens_BL))
        for place in range(prompt, tokens_BL.shape[1]):
            found.append(decoder.logits(tokens_BL[:, place : place + 1]).clone())
    assert decoder.uses_graphs == (DEVICE.type == "cuda")
    return torch.stack(found, dim=1)


def assert_close(found, expected):
    tolerance = 3e-2 if DEVICE.type == "cuda" else 1e-5
    assert (found - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize("shape", SHAPES)
def test_tokens_one_by_one_have_the_logits_of_the_whole_text(shape):
    network = small(shape)
    tokens_BL = torch.randint(0, 500, (3, 300), device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(1))
    with torch.no_grad():  # The plain versions: kernels are used in inference mode only.
        expected = network(Batch(tokens_BL))[:, 19:]
    assert_close(decoded(network, tokens_BL), expected)
    join_projections(network)
    assert network.layers["0"].attention.joined is not None
    assert_close(decoded(network, tokens_BL), expected)


@pytest.mark.parametrize("values", [None, "int8", "fp8"])
def test_compressed_projections_are_joined(values, monkeypatch):
    source, cpu = RandomCompressed("quickstart", values), torch.device("cpu")
    tokens_BL = torch.randint(0, 256, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = loaded(source, cpu, torch.float32, sparse=True)(Batch(tokens_BL))[:, 19:]
    if DEVICE.type == "cpu":  # There `loaded` joins nothing.
        prepare = sparse_linear.prepare
        monkeypatch.setattr(sparse_linear, "prepare", lambda network: (join_projections(network), prepare(network)))
    network = loaded(source, DEVICE, DTYPE, sparse=True)
    assert isinstance(network.layers["0"].attention.joined, sparse_linear.SparseLinear)
    assert_close(decoded(network, tokens_BL.to(DEVICE)).cpu(), expected)
