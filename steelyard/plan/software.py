"""What the planner must know of the program that trains: which kernels it starts, what it keeps, what it sends.

`STEELYARD` is this package's engine. `MEGATRON` is Megatron-LM and Megatron-DeepSpeed of 2021 to 2023, from which most
published measurements come, and on which the numbers of `compute.py` and `communication.py` are calibrated: an eager
program whose attention writes all scores to memory and whose speed on small layers is that of the host.
Kernels and passes are counted from the programs; what is fitted is marked so, and docs/plan.md says on which data.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from steelyard.core.recipe import Recipe


@dataclass(frozen=True)
class Software:
    """One program."""

    name: str
    scores: bool
    """Attention writes every score to memory, instead of keeping a tile of them in registers."""
    score_bytes: float
    """Bytes that one score moves in a forward pass between its two products: softmax, and dropout's 5 more."""
    stream_passes: float
    """How often the forward pass of a layer reads or writes a tensor as wide as the stream."""
    inner_passes: float
    """The same for tensors that tensor parallelism cuts: queries, keys, values, their outcome and the MLP's inside."""
    kernels: int
    """Operations that the host starts in a layer's forward pass; its backward pass starts twice as many."""
    launch: float
    """Seconds of the host for one of them (fitted)."""
    collective_launch: float
    """Seconds more for a collective operation: its own bookkeeping, and the wait for the slowest host (fitted)."""
    logit_bytes: float
    """Bytes that a logit moves in all of the loss, forward and backward."""
    gradient_bytes: int
    """Of a number that is summed over data-parallel ranks; 0: 2 under fp16, else 4, as Megatron sums bf16 in fp32."""
    overlapped: bool
    """Gradients of a layer are summed while those of the next are computed, in a step's last backward pass."""
    optimizer_bytes: float
    """Bytes that a step moves for each parameter whose state a rank holds."""
    scattered: bool
    """Tensor ranks send each a piece of the stream to the next stage, even without sequence parallelism."""
    step_overhead: float
    """Seconds of a step that nothing else explains: reading a batch, looking at the loss, logging (fitted)."""
    bf16_sum_bytes: float = 0.0
    """Bytes that adding a bf16 gradient to sums in fp32 moves, for each weight of a layer and micro-batch."""
    split_softmax: int = 0
    """Kernels more where a rank's heads times the micro-batch are no multiple of four: then softmax is not fused."""
    inner_kept: int = 2
    """Tensors as wide as the MLP's inside that a layer keeps: before and behind GELU, or the one that ReLU needs."""
    logits_left: int = 0
    """Logits of earlier micro-batches that are still held when the loss is computed."""
    flat_gradients: bool = False
    """Gradients are copied into one piece to be summed, and what stages exchange is held while it is in flight."""
    fp16_bytes: float = 0.0
    """Bytes more of a step under fp16: gradients are copied to fp32."""
    regathers: bool = False
    """With sequence parallelism the backward pass gathers the inputs of two products again, which were not kept."""
    stops_early: bool = False
    """Computing a layer again ends before its last product, which nothing needs."""
    hides_exchange: bool = False
    """Tensor ranks exchange pieces while they multiply those that are there: all but the first piece is hidden."""
    ring_share: float = 1.0
    """Of flash attention's rate, where keys and values come around a ring of context ranks, piece by piece (fitted)."""
    waits_to_send: bool = False
    """A rank sends to its neighbours in the pipeline in the order of its computing, not beside it."""
    waits_to_receive: bool = False
    """And receives from them in turn too, not while it sends."""


# Counted: 2 norms, 4 products, 2 of attention, scale-mask-softmax, 2 dropouts, 2 residual sums, bias and GELU, and
# about as many views, splits, transposes and copies that the host must start too.
MEGATRON = Software(
    name="megatron",
    scores=True,
    score_bytes=4.0,
    stream_passes=11.0,
    inner_passes=2.0,
    kernels=34,
    launch=24.6e-6,
    collective_launch=18.5e-6,
    logit_bytes=60.0,
    gradient_bytes=0,
    overlapped=False,
    optimizer_bytes=38.0,  # Adam 16 in and 12 out, weights to 16 bits 4 and 2, zeroing 4.
    scattered=True,
    step_overhead=3e-3,
    bf16_sum_bytes=10.0,  # Reads the sum (4) and the gradient (2), writes the sum (4): a kernel of its own.
    split_softmax=13,
    fp16_bytes=4.0,  # Copying 2 and 4; gradients to be zeroed are 2 shorter.
    regathers=True,
    waits_to_send=True,
)
# The same layers under DeepSpeed's pipeline engine, in fp32: Adam alone, and zeroing. Its host is slower (fitted).
DEEPSPEED = replace(
    MEGATRON,
    name="megatron-deepspeed",
    launch=30e-6,
    optimizer_bytes=32.0,
    logits_left=1,
    flat_gradients=True,
    waits_to_receive=True,
)
# Compiled: norms, activations and residual sums are one kernel each between products; flash attention.
STEELYARD = Software(
    name="steelyard",
    scores=False,
    score_bytes=0.0,
    stream_passes=8.0,
    inner_passes=2.0,
    kernels=20,
    launch=10e-6,
    collective_launch=40e-6,
    logit_bytes=12.0,
    gradient_bytes=4,
    overlapped=True,
    optimizer_bytes=34.0,
    scattered=False,
    step_overhead=5e-3,
    stops_early=True,
)
# Its loss is not compiled and takes logits in fp32: cast 6, softmax 12, backward 4, 12 and 6.
TORCHTITAN = replace(STEELYARD, name="torchtitan", ring_share=0.75, logit_bytes=40.0)
# The same with layers that are not compiled.
EAGER = replace(STEELYARD, name="eager", stream_passes=16.0, inner_passes=3.0, kernels=45)
KNOWN = {software.name: software for software in (STEELYARD, MEGATRON)}


def as_run(software: Software, recipe: Recipe, splits_backward: bool) -> Software:
    """The program as it trains a recipe: layers are compiled unless it says no, or zero bubble splits their backward
    pass, of which a compiled one would run all of it twice.
    """
    compiled = recipe.train.compile if recipe.train.compile is not None else not splits_backward
    return EAGER if software is STEELYARD and not compiled else software
