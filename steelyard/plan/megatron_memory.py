"""The memory of a rank under Megatron-LM of 2021 to 2023, and under Megatron-DeepSpeed's pipeline engine.

Weights, gradients and optimizer take 20 bytes a parameter in fp16: weight and gradient (2 + 2), their fp32 copies
(4 + 4) and Adam's moments (8); bf16 sums gradients in fp32 alone, which makes 18, and fp32 needs no copies: 16. Its
distributed optimizer (zero 1) deals the copies and moments out among the data-parallel ranks.

A layer keeps s b h (10 + 24 / t) + 5 a s^2 b / t bytes for each micro-batch in flight (Korthikanti 2022, section 4);
without dropout its masks and the dropped scores are not kept: s b h (8 + 24 / t) + 2 a s^2 b / t. In fp32 all but the
masks, which are bytes, takes twice that. What comes and goes beside stands at `_Layer.fleeting` and `_Layer.head`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from steelyard.core.recipe import Recipe
from steelyard.plan.layout import Layout
from steelyard.plan.predict import Predictor
from steelyard.plan.software import Software
from steelyard.sizes.activations import FP32, working_bytes
from steelyard.sizes.in_flight import fullest
from steelyard.sizes.memory import Memory

# Bytes a parameter: of weights, of gradients, and of what the distributed optimizer deals out.
EACH = {"fp16": (2, 2, 16), "bf16": (2, 4, 12), "fp32": (4, 4, 8), "fp8": (2, 4, 12)}
BUCKET = 500_000_000  # numbers that DeepSpeed's pipeline engine sums at once, in a copy that it makes of them


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
    recipe, software, step = predictor.recipe, predictor.software, predictor.step(layout)
    weights, gradients, state = EACH[recipe.train.precision]
    shards = layout.data * layout.context if layout.zero else 1
    layer = _Layer(recipe, layout, software)
    found = []
    for rank in ranks:
        held = step.held(layout.partition, rank)
        states = fullest(layout.schedule, layout.pipeline, layout.virtual, step.micro_batches, rank)
        layers = layout.partition[rank :: layout.pipeline]
        kept = max(sum(n * count for n, count in zip(state_, layers, strict=False)) for state_ in states)
        flying = max(sum(state_[: layout.virtual]) for state_ in states)
        head = layer.head() if rank == layout.pipeline - 1 else 0
        found.append(
            Memory(
                weights=weights * held,
                working_copies=0,
                gradients=gradients * held,
                optimizer=-(-state * held // shards),
                activations=kept * layer.kept(layout.recompute),
                # The loss is over when the layers' backward passes begin: of the two, the larger counts.
                temporaries=max(0, layer.fleeting() - head) if any(layers) else 0,
                head_and_loss=head,
                layer_buffers=gradients * min(held, BUCKET) if software.flat_gradients and layout.data > 1 else 0,
                exchange_buffers=layer.pieces() * flying if layout.pipeline > 1 else 0,
                host=0,
            )
        )
    return found


class _Layer:
    """What one micro-batch takes on a rank, in bytes."""

    def __init__(self, recipe: Recipe, layout: Layout, software: Software) -> None:
        model, self.layout, self.software = recipe.model, layout, software
        self.each, self.t = working_bytes(recipe), layout.tensor
        tokens = layout.micro_batch * recipe.data.sequence_length
        self.stream = tokens * model.hidden
        self.along = self.t if layout.sequence_parallel else 1
        self.inside = tokens * model.ffn // self.t
        self.scores = model.heads // self.t * tokens * recipe.data.sequence_length
        self.logits = tokens * model.padded_vocab // self.t
        self.masks = 2 if model.dropout else 0
        self.score_bytes = self.each + (1 + self.each if model.attention_dropout else 0)

    def kept(self, recompute: str | int) -> int:
        """Between a layer's forward and backward pass."""
        if recompute == "full":
            return self.each * self.stream // self.along
        whole = self.stream * (4 * self.each + self.masks) // self.along
        whole += self.each * (4 * self.stream // self.t + self.software.inner_kept * self.inside)
        return whole if recompute == "selective" else whole + self.score_bytes * self.scores

    def fleeting(self) -> int:
        """What is computed again for the backward pass of a layer, and the gradients inside it.

        Those of the scores are the largest: before and behind softmax. By then the MLP has given back what it kept: its
        input before and behind the norm, and its inside.
        """
        again = self.kept("none") - self.kept(self.layout.recompute)
        given_back = self.each * (2 * self.stream // self.along + self.software.inner_kept * self.inside)
        return again + max(0, 2 * self.each * self.scores - given_back)

    def head(self) -> int:
        """Logits as the product gives them, in fp32 where that is not the same, and their softmax; the final norm.

        DeepSpeed's pipeline has two buffers on the last stage, of which the other holds the last micro-batch's logits.
        """
        copied = 0 if self.each == FP32 else FP32
        return self.logits * (self.each + copied + FP32 * (1 + self.software.logits_left)) + 2 * self.each * self.stream

    def pieces(self) -> int:
        """What a rank received and what it sent of a micro-batch in flight, where the program holds on to these."""
        return 2 * self.each * self.stream // self.t if self.software.flat_gradients else 0
