"""Selective recomputation keeps the outputs of attention, full recomputation computes them again."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from steelyard import model as models
from steelyard.core.recipe.families.llama import LlamaConfig
from steelyard.model.attention import has_varlen_attention, varlen_options
from steelyard.parallel import activation_checkpoint

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NEEDS_GPU])]
LAYERS = 3


def attention_forwards(recompute: str, device: str, kv_heads: int, packed: bool) -> int:
    """How often attention is computed in one forward and backward pass."""
    config = LlamaConfig(family="llama", layers=LAYERS, hidden=64, heads=4, kv_heads=kv_heads, ffn=96, vocab=128)
    network = models.build(config)
    models.init_weights(network, 1, config.init_std, config.layers)
    network = network.to(device, torch.bfloat16)
    network.dtype = torch.bfloat16
    activation_checkpoint.apply(network, recompute)
    tokens = torch.randint(0, 128, (2, 64), device=device)
    starts = torch.tensor([[0, 7, 40], [0, 32, 64]], dtype=torch.int32) if packed else None
    batch = models.Batch(tokens, tokens, document_starts_BN=starts)
    with AttentionForwards() as found:
        network(batch).sum().backward()
    return found.count


class AttentionForwards(TorchDispatchMode):
    """Counts attention that is computed; what selective recomputation has kept does not come this far."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func)
        self.count += ("attn" in name or "attention" in name) and "backward" not in name
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
def test_attention_runs_again_only_in_full_recomputation(device, kv_heads, packed):
    if device == "cuda" and packed:
        assert has_varlen_attention(torch.device(device, 0), torch.bfloat16, 16)
    counts = {
        recompute: attention_forwards(recompute, device, kv_heads, packed)
        for recompute in ("none", "selective", "full")
    }
    assert counts == {"none": LAYERS, "selective": LAYERS, "full": 2 * LAYERS}


@pytest.mark.parametrize(
    ("parameters", "options"),
    [
        (("query", "is_causal", "return_aux"), {"is_causal": True}),
        (("query", "return_aux", "window_size"), {"window_size": (-1, 0)}),
        (("query", "window_size", "enable_gqa"), {"window_size": (-1, 0), "enable_gqa": True}),
    ],
    ids=["2.10", "2.11", "2.13"],
)
def test_variable_length_attention_is_causal_by_whatever_keyword_there_is(parameters, options):
    assert varlen_options(parameters) == options
