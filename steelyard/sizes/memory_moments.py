"""The peak of a step: the fullest of the moments at which different kinds of memory are full.

forward       the last layer computes: what it exchanges with other ranks, and the weights gathered before it
loss          all activations in flight, and a chunk of logits; the last micro-batch has no gradients yet
head          the gradient of the head, the same times the loss scale, and its copy in the precision of the weights
backward      the backward pass of the last layer: the same without the logits
reduce        its gradients are copied into the buffer that is summed over ranks; its activations are free
next          the backward pass of the layer before it, while FSDP keeps that buffer
bottom        the activations of the first layer only, and the gradients of all others
ends          gradients of the embedding and the head are reduced, after all activations are freed
update        weights, gradients and optimizer state

Gradients exist before the backward pass only if an earlier micro-batch has finished its own by then.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MomentSizes:
    """Bytes of a rank from which its moments are summed."""

    always: int
    """Weights, optimizer state and receive buffers of the pipeline."""
    exchanged: int
    """What the forward pass of a layer exchanges with tensor, context or expert ranks."""
    copies: int
    """Weights in the working precision, held until the backward pass of their layer."""
    activations: int
    """Of all micro-batches in flight."""
    last_layer: int
    """The part of one micro-batch and its last layer."""
    head: int
    """The last stage only: what the backward pass of final norm and head frees, less the gradient it returns."""
    in_flight: int
    layers: int
    """Layers of the rank."""
    before: int
    """Gradients of earlier micro-batches in full, at the fullest moment of the activations."""
    unwaited: int
    """The buffer in which FSDP reduced the embedding and head of the micro-batch before."""
    after: int
    """Gradients after the last backward pass."""
    new: int
    """Gradients of one layer that no other rank shares."""
    logits: int
    """The last stage only: a chunk of logits and what is computed from it beside `tables`, and the cast head."""
    tables: int
    """The last stage only: gradients of the head that forward passes keep."""
    table: int
    working: int
    """What the backward pass of a layer adds at most, its weight gradients included."""
    gathered: int
    """The flat buffer of the gather before the last layer, which FSDP keeps until the next gather."""
    gathering: int
    """ZeRO 3: the weights of the layer, and the flat buffer of the next one."""
    summed: int
    """The flat buffer in which the gradients of a layer are reduced."""
    shard: int
    """This rank's part of the sum, unless `before` has room for it."""
    unsummed: int
    """The gradients of a layer in the working precision, from which that buffer is filled."""
    freed: int
    """What the backward pass of the head frees: gradients in fp32, of which FSDP keeps a copy in 16 bits."""
    end_buffers: int
    """Buffers to cast, gather and reduce the embedding and head."""


def peak(of: MomentSizes) -> int:
    """Bytes at the fullest moment."""
    share = 1 / max(1, of.in_flight)
    one = share / max(1, of.layers)
    rest = 1 - share + one
    full = of.always + of.copies + of.activations + of.before + of.unwaited + of.tables
    backward = full + of.gathering + of.working - of.freed - of.head
    above = full - of.unwaited - of.last_layer - of.freed - of.head
    if not of.before:  # The gradient of the head is the first one.
        backward += of.table - min(of.tables, of.table)
    own = of.gathering // 2
    summed = of.summed if of.layers > 1 else 0
    bottom = of.always + int(of.copies * rest) + int(of.activations * rest) + of.after + own
    return max(
        full - of.tables + of.exchanged + of.gathered,
        full + of.logits + of.gathered,
        full + of.table + (of.table - of.freed if of.freed else 0),
        backward,
        above + own + of.unsummed + of.summed,
        above + of.gathering + of.summed + of.shard + of.working if of.layers > 1 else 0,
        bottom + max(summed + of.working - (0 if of.before else of.new), of.unsummed + of.summed),
        of.always + int(of.activations * (1 - share)) + of.after + of.end_buffers,
        of.always + of.after,
    )
