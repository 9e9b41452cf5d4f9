"""The memory of ranks under Megatron-LM of 2021 to 2023 and Megatron-DeepSpeed's pipeline engine.

They take 20 bytes per parameter in fp16: weight and gradient (2 + 2), their fp32 copies (4 + 4) and Adam's moments (8).
In bf16 gradients are only summed in fp32, which makes 18; fp32 needs no copies, which makes 16. The distributed
optimizer (ZeRO 1) shards copies and moments over the data-parallel ranks. A layer keeps s b h (10 + 24 / t) +
5 a s^2 b / t bytes per micro-batch in flight (Korthikanti 2022, section 4), and without dropout s b h (8 + 24 / t) +
2 a s^2 b / t. In fp32 everything except the dropout masks takes twice as much.
"""

from __future__ import annotations

from collections.abc import Sequence

from steelyard.core.recipe import Recipe
from steelyard.planning.layout import Layout
from steelyard.planning.software import Software
from steelyard.planning.step import StepCost
from steelyard.sizes.activations import FP32, working_bytes
from steelyard.sizes.in_flight import fullest
from steelyard.sizes.memory import Memory

# Bytes per parameter: weights, gradients, and what the distributed optimizer shards.
PARAM_BYTES = {"fp16": (2, 2, 16), "bf16": (2, 4, 12), "fp32": (4, 4, 8), "fp8": (2, 4, 12)}
BUCKET = 500_000_000  # values that DeepSpeed's pipeline engine copies into one bucket and reduces at once


def memories(recipe: Recipe, software: Software, step: StepCost, layout: Layout, ranks: Sequence[int]) -> list[Memory]:
    """The memory of some pipeline ranks, by kind."""
    weights, gradients, state = PARAM_BYTES[recipe.train.precision]
    shards = layout.data * layout.context if layout.zero else 1
    layer = _Layer(recipe, layout, software)
    found = []
    for rank in ranks:
        held = step.held(layout.partition, rank)
        states = fullest(layout.schedule, layout.pipeline, layout.virtual, step.table.micro_batches, rank)
        layers = layout.partition[rank :: layout.pipeline]
        kept = max(sum(n * count for n, count in zip(state_, layers, strict=False)) for state_ in states)
        in_flight = max(sum(state_[: layout.virtual]) for state_ in states)
        head = layer.head() if rank == layout.pipeline - 1 else 0
        found.append(
            Memory(
                weights=weights * held,
                working_copies=0,
                gradients=gradients * held,
                optimizer=-(-state * held // shards),
                activations=kept * layer.kept(layout.recompute),
                # The loss is freed before the backward passes of the layers begin: only the larger of the two counts.
                temporaries=max(0, layer.temporaries() - head) if any(layers) else 0,
                head_and_loss=head,
                layer_buffers=gradients * min(held, BUCKET) if software.flat_gradients and layout.data > 1 else 0,
                exchange_buffers=layer.exchanged() * in_flight if layout.pipeline > 1 else 0,
                host=0,
            )
        )
    return found


class _Layer:
    """Bytes of one micro-batch on one rank."""

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
        """Activations saved between the forward and backward pass of a layer."""
        if recompute == "full":
            return self.each * self.stream // self.along
        whole = self.stream * (4 * self.each + self.masks) // self.along
        whole += self.each * (4 * self.stream // self.t + self.software.inner_kept * self.inside)
        return whole if recompute == "selective" else whole + self.score_bytes * self.scores

    def temporaries(self) -> int:
        """Recomputed activations, and gradients inside the layer, during its backward pass.

        The gradients of the scores before and after softmax are the largest. At that point the MLP has freed its saved
        tensors: its input before and after the norm, and its hidden activations.
        """
        again = self.kept("none") - self.kept(self.layout.recompute)
        freed = self.each * (2 * self.stream // self.along + self.software.inner_kept * self.inside)
        return again + max(0, 2 * self.each * self.scores - freed)

    def head(self) -> int:
        """Logits in the working precision, in fp32 if that differs, and their softmax; and the final norm.

        DeepSpeed's last stage has two buffers; the second one holds the logits of the previous micro-batch.
        """
        copied = 0 if self.each == FP32 else FP32
        return self.logits * (self.each + copied + FP32 * (1 + self.software.logits_left)) + 2 * self.each * self.stream

    def exchanged(self) -> int:
        """What a rank received and sent for a micro-batch in flight, if the program keeps these tensors."""
        return 2 * self.each * self.stream // self.t if self.software.flat_gradients else 0
