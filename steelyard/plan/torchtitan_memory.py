"""The memory of a rank under TorchTitan: FSDP2 over the data and context ranks, and a loss over whole fp32 logits.

Three moments are weighed against each other, since they do not hold the same:

- the loss: weights and Adam's moments (4 + 8 bytes a parameter of a rank's share), what layers kept, the gathered
  embedding and head, and logits;
- the first layers of a backward pass: the same with the layer that is computed again, gathered layers and a layer's
  gradients on their way in place of logits;
- the update: weights, gradients, moments, and one more fp32 number each, for it is done tensor by tensor.

In a pipeline FSDP keeps what it gathered for all micro-batches (2 bytes a parameter) and sums gradients before they are
sharded (4): both in the first two moments. Recorded is what PyTorch's allocator took from the GPU, gaps included.
"""

from __future__ import annotations

from collections.abc import Sequence

from steelyard.core.recipe import Recipe
from steelyard.core.recipe.model_section import GptConfig
from steelyard.plan.layout import Layout
from steelyard.plan.predict import Predictor
from steelyard.sizes import activations
from steelyard.sizes.activations import FP32
from steelyard.sizes.in_flight import fullest
from steelyard.sizes.memory import Memory
from steelyard.sizes.stage_layers import stage_parameters

WORKING = 2  # bytes of a gathered weight
# Of a logit: in 16 bits, in fp32, its softmax and, backward, two gradients, of which one takes the fp32 logits' place.
# The 16-bit block serves none of the larger ones.
LOGIT_BYTES = WORKING + 3 * FP32
GAPS = 0.08  # of what tensors take, that the allocator holds beside it (fitted)


def memories(predictor: Predictor, layout: Layout, ranks: Sequence[int]) -> list[Memory]:
    """By kind at the fullest of the moments, for some of the pipeline ranks."""
    recipe = layout.applied(predictor.recipe)
    micro_batches = predictor.micro_batches(layout)
    return [max(_moments(recipe, layout, micro_batches, rank), key=lambda moment: moment.total) for rank in ranks]


def _moments(recipe: Recipe, layout: Layout, micro_batches: int, rank: int) -> list[Memory]:
    stages = range(rank, layout.pipeline * layout.virtual, layout.pipeline)
    parts = [stage_parameters(recipe, stage, layout.tensor) for stage in stages]
    held, layer = sum(part.total for part in parts), max(part.layer for part in parts)
    root = held - sum(part.layer * part.layers for part in parts)
    share = -(-held // (layout.data * layout.context))
    tokens = layout.micro_batch * recipe.data.sequence_length // layout.context
    piped = layout.pipeline > 1
    kept = tokens * _flying(recipe, layout, micro_batches, rank)
    gathered = WORKING * (held if piped else root)
    sums = FP32 * held if piped else 0
    logits = tokens * recipe.model.padded_vocab // layout.tensor
    last = layout.pipeline * layout.virtual - 1 in stages
    exchanged = 2 * micro_batches * tokens * activations.widths(recipe).stream if piped else 0
    again = activations.layer(recipe) if layout.recompute != "none" else 0
    ends = WORKING * root if last else 0
    return [
        _memory(share, 2, 0, gathered, sums, kept, 0, LOGIT_BYTES * logits if last else 0, WORKING * layer, exchanged),
        # The layer at work, the next, the flat buffer that one arrived in; a gradient, and its fp32 copy to be reduced.
        _memory(share, 2, 0, gathered, sums + ends, kept, tokens * (again + activations.temporaries(recipe)), 0,
                ((0 if piped else 3 * WORKING) + WORKING + FP32) * layer, exchanged),
        _memory(share, 2, FP32 * share, gathered, 0, 0, FP32 * share, 0, (WORKING + FP32) * root, exchanged),
    ]  # fmt: skip


def _memory(
    share: int, states: int, sharded: int, gathered: int, sums: int, kept: int, fleeting: int, head: int, buffers: int,
    exchanged: int,
) -> Memory:  # fmt: skip
    found = {
        "weights": FP32 * share, "working_copies": gathered, "gradients": sharded + sums,
        "optimizer": states * FP32 * share, "activations": kept, "temporaries": fleeting, "head_and_loss": head,
        "layer_buffers": buffers, "exchange_buffers": exchanged,
    }  # fmt: skip
    return Memory(**{kind: int(size * (1 + GAPS)) for kind, size in found.items()}, host=0)


def _flying(recipe: Recipe, layout: Layout, micro_batches: int, rank: int) -> int:
    """Bytes per token of what layers keep for all micro-batches in flight."""
    layers = layout.partition[rank :: layout.pipeline]
    states = fullest(layout.schedule, layout.pipeline, layout.virtual, micro_batches, rank)
    count = max(sum(n * each for n, each in zip(state, layers, strict=False)) for state in states)
    return count * layer_kept(recipe)


def layer_kept(recipe: Recipe) -> int:
    """Bytes per token that a layer keeps.

    Selective recomputation keeps a layer's input, what attention gives out, every second matrix product, and what is
    summed over tensor ranks.
    """
    how, of = recipe.parallel.recompute, activations.widths(recipe)
    if how == "full":
        return of.stream
    if how != "selective":
        return activations.layer(recipe)
    if isinstance(recipe.model, GptConfig):
        products = [of.query + 2 * of.key, of.gathered, of.ffn, of.gathered]
    else:
        products = [of.query, of.key, of.key, of.gathered, of.ffn, of.ffn, of.gathered]
    summed = 2 * of.stream if recipe.parallel.tensor > 1 else 0
    return of.stream + of.query + of.log_sum + sum(products[::2]) + summed
