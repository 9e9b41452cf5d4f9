"""The memory of a rank under Megatron-LM of 2021 to 2023, for comparing predictions with runs of it.

Weights, gradients and optimizer take 20 bytes a parameter in fp16: weight and gradient (2 + 2), their fp32 copies
(4 + 4) and Adam's moments (8); bf16 sums gradients in fp32 alone, which makes 18. A layer keeps
s b h (10 + 24 / t) + 5 a s^2 b / t bytes for each micro-batch in flight (Korthikanti 2022, section 4); without dropout
its masks and the dropped scores are not kept: s b h (8 + 24 / t) + 2 a s^2 b / t. The head keeps fp32 logits.
"""

from __future__ import annotations

from dataclasses import dataclass

from steelyard.core.recipe import Recipe
from steelyard.plan.layout import Layout
from steelyard.plan.predict import Predictor
from steelyard.sizes.schedule import fullest

ALWAYS = {"fp16": 20, "bf16": 18, "fp32": 16}


@dataclass(frozen=True)
class Held:
    """Bytes of one pipeline rank between steps, and at its fullest."""

    always: int
    peak: int


def megatron(predictor: Predictor, layout: Layout) -> list[Held]:
    """For each pipeline rank of a layout."""
    recipe, step = predictor.recipe, predictor.step(layout)
    found = []
    for rank in range(layout.pipeline):
        always = ALWAYS[recipe.train.precision] * step.held(layout.partition, rank)
        states = fullest(layout.schedule, layout.pipeline, layout.virtual, step.micro_batches, rank)
        layers = layout.partition[rank :: layout.pipeline]
        kept = max(sum(n * count for n, count in zip(state, layers, strict=False)) for state in states)
        peak = always + kept * _layer(recipe, layout)
        if rank == layout.pipeline - 1:
            tokens = layout.micro_batch * recipe.data.sequence_length
            peak += 8 * tokens * recipe.model.padded_vocab // layout.tensor  # Logits and their gradient in fp32.
        found.append(Held(always, peak))
    return found


def _layer(recipe: Recipe, layout: Layout) -> int:
    model, length, t = recipe.model, recipe.data.sequence_length, layout.tensor
    stream = length * layout.micro_batch * model.hidden
    if layout.recompute == "full":
        return 2 * stream
    whole = (10 if model.dropout else 8) // (t if layout.sequence_parallel else 1)
    scores = (5 if model.attention_dropout else 2) * model.heads * length * length * layout.micro_batch // t
    return stream * whole + stream * 24 // t + (0 if layout.recompute == "selective" else scores)
