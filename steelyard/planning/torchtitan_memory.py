"""The memory of ranks under TorchTitan: FSDP2 over the data and context ranks, and a loss on full fp32 logits.

The peak is the largest of three moments:

- the loss: weights and Adam's moments (4 + 8 bytes per parameter of a shard), saved activations, the gathered embedding
  and head, and the logits;
- the first layers of a backward pass: the recomputed layer, gathered layers and the gradients of a layer take the place
  of the logits;
- the optimizer step: weights, gradients, moments, and one more fp32 value per parameter, because it runs per tensor.

In a pipeline, FSDP keeps gathered weights for all micro-batches (2 bytes per parameter) and sums gradients before it
shards them (4). Under ZeRO 2 it keeps gathered weights until the backward pass. The published figures are what the
allocator of PyTorch reserved, including fragmentation.
"""

from __future__ import annotations

from collections.abc import Sequence

from steelyard.core.recipe import Recipe
from steelyard.planning.layout import Layout
from steelyard.sizes import activations
from steelyard.sizes.activations import FP32
from steelyard.sizes.in_flight import fullest
from steelyard.sizes.memory import Memory
from steelyard.sizes.stage_layers import stage_parameters

WORKING = 2  # bytes of a weight that FSDP gathers
# Bytes per logit: in 16 bits, in fp32, its softmax and, in the backward pass, two gradients, of which one reuses the
# memory of the fp32 logits. The 16-bit block is too small to be reused.
LOGIT_BYTES = WORKING + 3 * FP32
FRAGMENTATION = 0.08  # share of the tensors' memory that PyTorch's allocator reserves in addition (fitted)


def memories(recipe: Recipe, layout: Layout, micro_batches: int, ranks: Sequence[int]) -> list[Memory]:
    """The memory of some pipeline ranks at the fullest moment, by kind."""
    recipe = layout.applied(recipe)
    return [max(_moments(recipe, layout, micro_batches, rank), key=lambda moment: moment.total) for rank in ranks]


def _moments(recipe: Recipe, layout: Layout, micro_batches: int, rank: int) -> list[Memory]:
    """Memory during the loss, the backward pass and the optimizer step."""
    stages = range(rank, layout.pipeline * layout.virtual, layout.pipeline)
    parts = [stage_parameters(recipe, stage, layout.tensor) for stage in stages]
    held, layer = sum(part.total for part in parts), max(part.layer for part in parts)
    root = sum(part.ends for part in parts)
    share = -(-held // (layout.data * layout.context // recipe.parallel.replicate))
    tokens = layout.micro_batch * recipe.data.sequence_length // layout.context
    piped = layout.pipeline > 1
    kept = tokens * _kept(recipe, layout, micro_batches, rank)
    stays = piped or layout.zero == 2
    gathered = WORKING * (held if stays else root)
    sums = FP32 * (held if piped else share if micro_batches > 1 else 0)
    last = layout.pipeline * layout.virtual - 1 in stages
    logits = LOGIT_BYTES * (tokens * recipe.model.padded_vocab // layout.tensor) if last else 0
    again = activations.layer(recipe) if layout.recompute != "none" else 0
    temporaries = tokens * (again + activations.temporaries(recipe))
    # The current layer, the next one and its flat gather buffer; a gradient, and its fp32 copy to be reduced.
    buffers = ((0 if stays else 3 * WORKING) + WORKING + FP32) * layer
    ends = WORKING * root if last else 0
    always = {
        "weights": FP32 * share,
        "working_copies": gathered,
        "optimizer": 2 * FP32 * share,
        "exchange_buffers": 2 * micro_batches * tokens * activations.widths(recipe).stream if piped else 0,
    }
    loss = {"gradients": sums, "activations": kept, "head_and_loss": logits, "layer_buffers": WORKING * layer}
    backward = {
        "gradients": sums + ends, "activations": kept, "temporaries": temporaries, "layer_buffers": buffers
    }  # fmt: skip
    update = {"gradients": FP32 * share, "temporaries": FP32 * share, "layer_buffers": (WORKING + FP32) * root}
    return [_reserved(always | moment) for moment in (loss, backward, update)]


def _reserved(sizes: dict[str, int]) -> Memory:
    """Memory that the allocator reserves for tensors of these sizes; kinds that are not listed are 0."""
    empty = {"activations": 0, "temporaries": 0, "head_and_loss": 0}
    return Memory(**{kind: int(size * (1 + FRAGMENTATION)) for kind, size in (empty | sizes).items()}, host=0)


def _kept(recipe: Recipe, layout: Layout, micro_batches: int, rank: int) -> int:
    """Bytes per token that the layers of a rank keep for all micro-batches in flight."""
    layers = layout.partition[rank :: layout.pipeline]
    states = fullest(layout.schedule, layout.pipeline, layout.virtual, micro_batches, rank)
    count = max(sum(n * each for n, each in zip(state, layers, strict=False)) for state in states)
    return count * layer_kept(recipe)


def layer_kept(recipe: Recipe) -> int:
    """Bytes per token that a layer keeps.

    Selective recomputation keeps the input of a layer, the output of attention, every second matrix product, and the
    results of reductions over tensor ranks.
    """
    how, of = recipe.parallel.recompute, activations.widths(recipe)
    if how == "full":
        return of.stream
    if how != "selective":
        return activations.layer(recipe)
    if not recipe.model.blocks.layers[0].mlp.gated:
        products = [of.query + 2 * of.key, of.gathered, of.ffn, of.gathered]
    else:
        products = [of.query, of.key, of.key, of.gathered, of.ffn, of.ffn, of.gathered]
    summed = 2 * of.stream if recipe.parallel.tensor > 1 else 0
    return of.stream + of.query + of.log_sum + sum(products[::2]) + summed
