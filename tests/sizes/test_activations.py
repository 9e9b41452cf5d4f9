"""The formulas against what autograd really keeps, on a CPU and, where there is one, on a GPU.

Tolerance: 1%, which covers the vectors of a layer (biases, the statistics of norms). The weights of a rank that shares
them with none are fp32, and their copies in 16 bits are kept too.
"""

import platform
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from steelyard import model
from steelyard.core.recipe import Recipe, load_recipe
from steelyard.core.recipe.blocks import ExpertsBlock
from steelyard.model import cpu_bf16, experts
from steelyard.model.transformer import LayerInputs
from steelyard.parallel.activation_checkpoint import _policy
from steelyard.sizes import activations
from steelyard.sizes.activations import working_bytes
from steelyard.sizes.param_count import parameters

cpu_bf16.use_fp32_products()

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NEEDS_GPU])]
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
LAYERS, BATCH, LENGTH = 3, 2, 128
SMALL = [f"model.layers={LAYERS}", "model.hidden=256", "model.heads=8", "model.vocab=128"]
SMALL += [f"data.sequence_length={LENGTH}", "train.micro_batch=2", "train.global_batch=2"]
LLAMA = [*SMALL, "model.ffn=640", "model.head_dim=32"]
FAMILIES = {
    "gpt": ("gpt2-small", SMALL),
    "llama": ("llama3.2-1b", LLAMA),
    "grouped": ("llama3.2-1b", [*LLAMA, "model.kv_heads=2"]),
}
MOE = {
    "name": "moe",
    "model": {
        "family": "mixtral", "layers": LAYERS, "hidden": 256, "heads": 8, "ffn": 640, "vocab": 128, "experts": 8,
        "expert_ffn": 192, "experts_per_token": 2,
    },
    "data": {"sequence_length": LENGTH},
    "train": {"micro_batch": 2, "global_batch": 2},
}  # fmt: skip
EXPERTS = {
    "experts": {},
    "many experts": {"experts": 64, "experts_per_token": 6, "expert_ffn": 96},
    "shared expert": {"shared_ffn": 320, "router_score": "sigmoid", "router_bias_rate": 0.001},
    "dense layers": {"dense_layers": [0, 2]},
}


def moe_recipe(kind, **sections):
    values = MOE | {"model": MOE["model"] | EXPERTS[kind]}
    return Recipe.model_validate({name: values.get(name, {}) | sections.get(name, {}) for name in {**values, **sections}
                                  if name != "name"} | {"name": "moe"})  # fmt: skip


def recipe_of(family, *overrides):
    name, shape = FAMILIES[family]
    return load_recipe(name, [*shape, *overrides])


class Layers:
    """A recipe's layers with a stream that goes into them."""

    def __init__(self, recipe, device="cpu"):
        dtype = TYPES[recipe.train.precision]
        with torch.device(device):
            self.model = model.build(recipe.model)
            model.init_weights(self.model, 0, 0.02, LAYERS)
            self.stream = torch.randn(BATCH, LENGTH, recipe.model.hidden, dtype=dtype, requires_grad=True)
            rotations = self.model.rotations(torch.arange(LENGTH)[None])
            self.context = LayerInputs(next(iter(rotations.values()), None))
            if recipe.model.dropout:
                noise = torch.arange(BATCH), torch.arange(LENGTH)[None]
                self.context = self.context._replace(sample_ids_B=noise[0], row_positions_BL=noise[1])

    def bytes_kept(self, again=0, kept=None):
        """Bytes of all storages kept for the backward pass when the first layers are computed again."""
        shared = [*self.model.parameters(), *(self.context.rotation or ())]
        not_counted = {tensor.untyped_storage().data_ptr() for tensor in shared}
        kept = {} if kept is None else kept

        def keep(tensor):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in not_counted:
                kept[storage.data_ptr()] = storage
            return tensor

        stream = self.stream
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            for number, layer in enumerate(self.model.layers.values()):
                compute = partial(checkpoint, layer, use_reentrant=False) if number < again else layer
                stream = compute(stream, self.context)
        assert stream.requires_grad
        return sum(storage.nbytes() for storage in kept.values())


def copies_of_weights(recipe, layers):
    each = working_bytes(recipe)
    return 0 if each == 4 else each * parameters(recipe.model).all_layers * layers // LAYERS


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("precision", TYPES)
@pytest.mark.parametrize("recompute", ["none", "full", 2])
def test_layers_keep_what_autograd_keeps(device, family, precision, recompute):
    if device == "cuda" and precision == "fp32":
        pytest.skip("flash attention is for 16 bits")
    plan = [f"train.precision={precision}", f"parallel.recompute={recompute}", "train.compile=false"]
    recipe = recipe_of(family, *plan)
    whole = activations.layers_kept(recipe, LAYERS)
    per_token = whole * activations.layer(recipe, fused_norm=device == "cuda")
    per_token += (LAYERS - whole) * activations.full_layer(recipe)
    predicted = BATCH * LENGTH * per_token + copies_of_weights(recipe, whole)
    assert Layers(recipe, device).bytes_kept(LAYERS - whole) == pytest.approx(predicted, rel=0.01)
    if device == "cuda":
        assert activations.per_token(recipe).stage(range(LAYERS)) == per_token


@pytest.mark.parametrize("kind", EXPERTS)
@pytest.mark.parametrize("precision", TYPES)
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_layers_with_experts_keep_what_autograd_keeps(kind, precision, recompute):
    train = {"precision": precision, "compile": False}
    recipe = moe_recipe(kind, train=train, parallel={"recompute": recompute})
    whole = activations.layers_kept(recipe, LAYERS)
    kept = [activations.layer(recipe, fused_norm=False, number=number) for number in range(whole)]
    kept += [activations.full_layer(recipe)] * (LAYERS - whole)
    routers = expert_router_bytes(recipe) if whole else 0
    predicted = BATCH * LENGTH * sum(kept) + copies_of_weights(recipe, whole) - routers
    assert Layers(recipe).bytes_kept(LAYERS - whole) == pytest.approx(predicted, rel=0.01)


def expert_router_bytes(recipe):
    """Routers compute in fp32 and need no copy of their weights in 16 bits."""
    layers = [layer.mlp for layer in recipe.model.blocks.layers if isinstance(layer.mlp, ExpertsBlock)]
    each = working_bytes(recipe)
    return 0 if each == 4 else sum(each * layer.routing.experts * layer.hidden for layer in layers)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", FAMILIES)
def test_compiled_layers_keep_less(device, family):
    recipe = recipe_of(family, "train.precision=bf16", "train.compile=true")
    layers = Layers(recipe, device)
    for layer in layers.model.layers.values():
        layer.compile()
    predicted = BATCH * LENGTH * LAYERS * activations.layer(recipe) + copies_of_weights(recipe, LAYERS)
    assert layers.bytes_kept() == pytest.approx(predicted, rel=0.01)


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() in ("aarch64", "arm64"), reason="cpu_bf16 computes in fp32 there")
@pytest.mark.parametrize("kind", ["many experts", "shared expert"])
def test_compiled_layers_with_experts_keep_the_input_of_the_router_in_fp32(kind, monkeypatch):
    def product(x_SD, weight_XFD, counts_X):
        return experts.grouped_mm(x_SD, weight_XFD.to(x_SD.dtype), counts_X)  # as on a GPU

    monkeypatch.setattr(experts.ExpertLinear, "product", staticmethod(product))
    recipe = moe_recipe(kind, train={"precision": "bf16", "compile": True})
    layers = Layers(recipe)
    for layer in layers.model.layers.values():
        layer.compile()
    kept = BATCH * LENGTH * LAYERS * activations.layer(recipe)
    predicted = kept + copies_of_weights(recipe, LAYERS) - expert_router_bytes(recipe)
    found = layers.bytes_kept()
    assert found == pytest.approx(predicted, rel=0.01)
    assert found - copies_of_weights(recipe, LAYERS) == pytest.approx(kept, rel=0.01)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("precision", TYPES)
def test_selective_layers_keep_products_attention_and_their_input(family, precision):
    recipe = recipe_of(family, f"train.precision={precision}", "parallel.recompute=selective", "train.compile=false")
    assert selective_bytes(recipe) == pytest.approx(predicted_stage(recipe), rel=0.01)


@pytest.mark.parametrize("kind", EXPERTS)
@pytest.mark.parametrize("precision", TYPES)
def test_selective_layers_with_experts_keep_the_outputs_of_all_experts(kind, precision):
    train, parallel = {"precision": precision, "compile": False}, {"recompute": "selective"}
    recipe = moe_recipe(kind, train=train, parallel=parallel)
    assert selective_bytes(recipe) == pytest.approx(predicted_stage(recipe), rel=0.01)


def predicted_stage(recipe):
    return BATCH * LENGTH * activations.per_token(recipe).stage(range(LAYERS))


def selective_bytes(recipe):
    """Bytes of the storages that selective recomputation keeps."""
    caches = []

    def contexts():
        made = create_selective_checkpoint_contexts(_policy)
        caches.append(made[0].storage)
        return made

    layers = Layers(recipe)
    stream = layers.stream
    kept = {}
    for layer in layers.model.layers.values():
        kept[stream.untyped_storage().data_ptr()] = stream.untyped_storage()
        stream = checkpoint(layer, stream, layers.context, use_reentrant=False, context_fn=contexts)
    for output in torch.utils._pytree.tree_leaves([list(cache.values()) for cache in caches]):
        tensor = getattr(output, "val", output)
        if isinstance(tensor, torch.Tensor):
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
    return sum(storage.nbytes() for storage in kept.values())


def test_dropout_keeps_its_choice():
    recipe = recipe_of("gpt", "model.dropout=0.1", "train.precision=bf16", "train.compile=false")
    predicted = BATCH * LENGTH * LAYERS * activations.layer(recipe) + copies_of_weights(recipe, LAYERS)
    assert Layers(recipe).bytes_kept() == pytest.approx(predicted, rel=0.01)


def test_tensor_and_sequence_parallelism_divide_what_they_split():
    whole = activations.widths(load_recipe("llama3.1-70b", ["parallel.tensor=1"]))
    split = activations.widths(load_recipe("llama3.1-70b", ["parallel.tensor=8", "parallel.sequence_parallel=false"]))
    both = activations.widths(load_recipe("llama3.1-70b", ["parallel.tensor=8", "parallel.sequence_parallel=true"]))
    assert split.query * 8 == both.query * 8 == whole.query
    assert split.stream == whole.stream == both.stream * 8
    assert both.gathered == whole.gathered


def test_selective_keeps_less_than_none_and_more_than_full():
    for name in ("gpt2-small", "llama3.1-8b"):
        recipe = load_recipe(name)
        assert activations.full_layer(recipe) < activations.selective_layer(recipe) < activations.layer(recipe)
