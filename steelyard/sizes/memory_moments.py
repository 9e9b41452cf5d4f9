"""The peak of a step: the fullest of the moments at which different kinds of memory are full.

loss        all activations in flight, and a chunk of logits; the last micro-batch has no gradients yet
backward    the same without the logits, with the temporaries and new gradients of the last layer
reduce      the same without the activations and temporaries of the last layer, with the buffers of its reduction
bottom      the activations of the first layer only, and the gradients of all others
ends        gradients of the embedding and the head are reduced, after all activations are freed
update      weights, gradients and optimizer state

Gradients exist at the first two only if an earlier micro-batch has finished its backward pass by then.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MomentSizes:
    """Bytes of a rank from which its moments are summed."""

    always: int
    """Weights, optimizer state and receive buffers."""
    copies: int
    """Weights in the working precision, held until the backward pass of their layer."""
    activations: int
    """Of all micro-batches in flight."""
    in_flight: int
    layers: int
    """Layers of the rank."""
    before: int
    """Gradients of earlier micro-batches in full, at the fullest moment of the activations."""
    after: int
    """Gradients after the last backward pass."""
    new: int
    """Gradients of one layer as its backward pass returns them."""
    logits: int
    """The last stage only: a chunk of logits and what is computed from it, and the cast head."""
    tables: int
    """The last stage only: gradients of the head that forward passes keep."""
    table: int
    temporaries: int
    gathered: int
    """Weights of a layer that are gathered beside the ones in use."""
    buffers: int
    """Buffers to cast and gather one layer."""
    reducing: int
    """Buffers to gather the next layer and to reduce the gradients of one."""
    freed: int
    """What the backward pass of the head frees: gradients in fp32, of which FSDP keeps a copy in 16 bits."""
    end_buffers: int
    """The same for the embedding and head."""


def peak(of: MomentSizes) -> int:
    """Bytes at the fullest moment."""
    share = 1 / max(1, of.in_flight)
    one = share / max(1, of.layers)
    rest = 1 - share + one
    full = of.always + of.copies + of.activations + of.before + of.tables
    backward = full + of.new + of.buffers + of.temporaries - of.freed
    reduce = full - int(of.activations * one) + of.reducing - of.freed
    if not of.before:  # The gradient of the head is the first one.
        backward += of.table - min(of.tables, of.table)
    bottom = of.always + int(of.copies * rest) + int(of.activations * rest) + of.after
    bottom += max(of.buffers + of.temporaries, of.reducing)
    return max(
        full + of.logits + of.gathered,
        full + of.table,  # The gradient that the loss computed, and the same times the loss scale.
        backward,
        reduce,
        bottom,
        of.always + int(of.activations * (1 - share)) + of.after + of.end_buffers,
        of.always + of.after,
    )
