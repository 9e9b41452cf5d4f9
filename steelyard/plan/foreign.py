"""The memory of a rank under Megatron-LM of 2021 to 2023, for planning and for comparing predictions with runs of it.

Weights, gradients and optimizer take 20 bytes a parameter in fp16: weight and gradient (2 + 2), their fp32 copies
(4 + 4) and Adam's moments (8); bf16 sums gradients in fp32 alone, which makes 18. Its distributed optimizer (zero 1)
deals the copies and moments out among the data-parallel ranks. A layer keeps
s b h (10 + 24 / t) + 5 a s^2 b / t bytes for each micro-batch in flight (Korthikanti 2022, section 4); without dropout
its masks and the dropped scores are not kept: s b h (8 + 24 / t) + 2 a s^2 b / t. The head keeps fp32 logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from steelyard.core.recipe import Recipe
from steelyard.plan.layout import Layout
from steelyard.plan.predict import Predictor
from steelyard.sizes.memory import Memory
from steelyard.sizes.schedule import fullest

# Bytes a parameter: of weights, of gradients, and of what the distributed optimizer deals out.
EACH = {"fp16": (2, 2, 16), "bf16": (2, 4, 12), "fp32": (4, 4, 8), "fp8": (2, 4, 12)}


@dataclass(frozen=True)
class Held:
    """Bytes of one pipeline rank between steps, and at its fullest."""

    always: int
    peak: int


def megatron(predictor: Predictor, layout: Layout) -> list[Held]:
    """For each pipeline rank of a layout."""
    found = memories(predictor, layout, range(layout.pipeline))
    return [Held(each.weights + each.gradients + each.optimizer, each.total) for each in found]


def memories(predictor: Predictor, layout: Layout, ranks: Sequence[int]) -> list[Memory]:
    """By kind, for some of the pipeline ranks."""
    recipe, step = predictor.recipe, predictor.step(layout)
    weights, gradients, state = EACH[recipe.train.precision]
    shards = layout.data * layout.context if layout.zero else 1
    found = []
    for rank in ranks:
        held = step.held(layout.partition, rank)
        states = fullest(layout.schedule, layout.pipeline, layout.virtual, step.micro_batches, rank)
        layers = layout.partition[rank :: layout.pipeline]
        kept = max(sum(n * count for n, count in zip(state_, layers, strict=False)) for state_ in states)
        again = layout.recompute == "full" and any(layers)
        tokens = layout.micro_batch * recipe.data.sequence_length
        is_last = rank == layout.pipeline - 1
        found.append(
            Memory(
                weights=weights * held,
                working_copies=0,
                gradients=gradients * held,
                optimizer=-(-state * held // shards),
                activations=kept * _layer(recipe, layout, layout.recompute),
                temporaries=_layer(recipe, layout, "none") if again else 0,
                # Logits and their gradient in fp32.
                head_and_loss=8 * tokens * recipe.model.padded_vocab // layout.tensor if is_last else 0,
                layer_buffers=0,
                exchange_buffers=0,
                host=0,
            )
        )
    return found


def _layer(recipe: Recipe, layout: Layout, recompute: str | int) -> int:
    model, length, t = recipe.model, recipe.data.sequence_length, layout.tensor
    stream = length * layout.micro_batch * model.hidden
    if recompute == "full":
        return 2 * stream
    whole = stream * (10 if model.dropout else 8) // (t if layout.sequence_parallel else 1)
    scores = (5 if model.attention_dropout else 2) * model.heads * length * length * layout.micro_batch // t
    return whole + stream * 24 // t + (0 if recompute == "selective" else scores)
