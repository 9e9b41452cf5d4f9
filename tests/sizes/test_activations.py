"""The formulas against what autograd really keeps.

Run on a CPU, and on a GPU where there is one: there Llama's norm is fused. Tolerance: 1%, which is the statistics of
LayerNorm (bf16 on a CPU, fp32 on a GPU).
"""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from steelyard import model
from steelyard.core.recipe import load
from steelyard.model.llama import rotations
from steelyard.sizes import activations

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SMALL = ["model.layers=3", "model.hidden=256", "model.heads=8", "model.vocab=128", "data.sequence_length=128"]
FAMILIES = {
    "gpt": ("gpt2-small", SMALL),
    "llama": ("llama3.2-1b", [*SMALL, "model.ffn=640", "model.head_dim=32"]),
    "grouped": ("llama3.2-1b", [*SMALL, "model.ffn=640", "model.head_dim=32", "model.kv_heads=2"]),
}


def bytes_kept(shared, forward) -> int:
    """Bytes of all storages that autograd keeps for the backward pass, those of shared tensors left out."""
    weights = {tensor.untyped_storage().data_ptr() for tensor in shared}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = forward()
    assert result.requires_grad
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("precision", TYPES)
@pytest.mark.parametrize("recompute", ["none", "full", 2])
def test_layers_keep_what_autograd_keeps(device, family, precision, recompute):
    if device == "cuda" and precision == "fp32":
        pytest.skip("flash attention is for 16 bits")
    name, shape = FAMILIES[family]
    recipe = load(name, [*shape, f"train.precision={precision}", f"parallel.recompute={recompute}"])
    batch, length = 2, recipe.data.sequence_length
    with torch.device(device):
        stage = model.build(recipe.model).to(TYPES[precision])
        x = torch.randn(batch, length, recipe.model.hidden, dtype=TYPES[precision], requires_grad=True)
        turns = () if family == "gpt" else rotations(recipe.model, torch.arange(length)[None])
        rest = (turns, None) if turns else (None,)
    again = {"none": 0, "full": 3}.get(recompute, recompute)

    def forward():
        stream = x
        for number, layer in enumerate(stage.layers):
            stream = checkpoint(layer, stream, *rest, use_reentrant=False) if number < again else layer(stream, *rest)
        return stream

    fused = device == "cuda"
    predicted = again * activations.full_layer(recipe) + (3 - again) * activations.layer(recipe, fused)
    if fused:
        assert activations.recomputed(recipe, 3) == (again, predicted)
    measured = bytes_kept([*stage.parameters(), *turns], forward)
    assert measured == pytest.approx(batch * length * predicted, rel=0.01)
    assert sum(tensor.nbytes for tensor in turns) == length * activations.rotation(recipe)


def test_tensor_and_sequence_parallelism_divide_what_they_split():
    whole = activations.widths(load("llama3.1-70b", ["parallel.tensor=1"]))
    split = activations.widths(load("llama3.1-70b", ["parallel.tensor=8", "parallel.sequence_parallel=false"]))
    both = activations.widths(load("llama3.1-70b", ["parallel.tensor=8", "parallel.sequence_parallel=true"]))
    assert split.query * 8 == both.query * 8 == whole.query
    assert split.stream == whole.stream == both.stream * 8
    assert both.gathered == whole.gathered


def test_selective_keeps_less_than_none_and_more_than_full():
    for name in ("gpt2-small", "llama3.1-8b"):
        recipe = load(name)
        assert activations.full_layer(recipe) < activations.selective_layer(recipe) < activations.layer(recipe)
