"""Constants of the training program: which kernels it launches, which tensors it keeps, what it sends.

`STEELYARD` is this package's trainer. `MEGATRON` is Megatron-LM and Megatron-DeepSpeed of 2021 to 2023, the source of
most published measurements, on which the constants of `compute.py` and `communication.py` are calibrated: an eager
program whose attention writes all scores to memory, and whose speed on small layers is bound by the host. Kernels and
memory passes are counted from the programs. Fitted numbers are marked, and docs/plan.md says on which data.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from steelyard.core.recipe import Recipe


@dataclass(frozen=True)
class Software:
    """The constants of one training program."""

    name: str
    """The program; its variants have the same name."""
    product_share: float
    """Share of the rate of large matrix products that the products of a training step reach: shapes, clocks, caches."""
    scores: bool
    """Attention writes all scores to memory, unlike flash attention."""
    score_bytes: float
    """Bytes per score that softmax moves in a forward pass between the two products; dropout adds 5."""
    stream_passes: float
    """Reads and writes of a tensor of the residual stream's width in the forward pass of a layer."""
    head_passes: float
    """The same for queries and keys; with flash attention only those of rotary positions."""
    inner_passes: float
    """The same for the MLP's hidden width, of which a gated MLP has half more."""
    kernels: int
    """Kernels that the host launches in the forward pass of a layer; the backward pass launches twice as many."""
    launch: float
    """Host seconds per kernel launch (fitted). All host seconds are those of a host with the default speed."""
    collective_launch: float
    """Additional host seconds per collective: its setup, and the wait for the slowest host (fitted)."""
    logit_bytes: float
    """Bytes per logit that the loss moves, forward and backward."""
    gradient_bytes: int
    """Bytes of a reduced gradient; 0: 2 under fp16, otherwise 4, because Megatron reduces bf16 gradients in fp32."""
    overlapped: bool
    """Gradient reduction of a layer overlaps with the backward pass of the next one."""
    optimizer_bytes: float
    """Bytes that the optimizer step moves per parameter on a rank."""
    scattered: bool
    """Each tensor rank sends only its part of the activations to the next stage, even without sequence parallelism."""
    step_overhead: float
    """Fixed seconds per step: reading a batch, reading the loss, logging (fitted)."""
    bf16_sum_bytes: float = 0.0
    """Bytes per weight and micro-batch to add a bf16 gradient to an fp32 sum."""
    master_weights: bool = False
    """Weights are fp32, and cast for products of 16 bits; with several data ranks FSDP holds them."""
    fsdp_forward: float = 0.0
    """Additional host seconds of a layer's forward pass if FSDP holds its weights: its hooks (measured)."""
    fsdp_backward: float = 0.0
    """The same for the backward pass (measured)."""
    fsdp_gather: float = 0.0
    """Host seconds to gather the weights of a layer: copies, views, the collective (measured)."""
    fsdp_reduce: float = 0.0
    """The same to reduce its gradients (measured)."""
    routing_wait: float = 0.0
    """Host seconds for which the GPU waits after the host knows the slots that each expert rank receives (measured)."""
    fused_casts: bool = False
    """Without FSDP, products of 16 bits write their gradients in fp32."""
    split_softmax: int = 0
    """Additional kernels if heads x micro-batch of a rank is not a multiple of four: softmax is not fused then."""
    inner_kept: int = 2
    """Tensors of the MLP's hidden width that a layer keeps: input and output of GELU, or one for ReLU."""
    logits_left: int = 0
    """Micro-batches whose logits are still in memory when the loss of the next one is computed."""
    flat_gradients: bool = False
    """Gradients are copied into a flat buffer before reduction, and tensors sent between stages are kept in flight."""
    fp16_bytes: float = 0.0
    """Additional bytes per parameter of the optimizer step under fp16: gradients are copied to fp32."""
    regathers: bool = False
    """With sequence parallelism, the backward pass gathers the inputs of two products again."""
    per_op: bool = False
    """Selective recomputation keeps attention and every second matrix product, and computes the others again."""
    stops_early: bool = False
    """Recomputation of a layer stops before its last product, which the backward pass does not need."""
    exposed_exchange: float = 1.0
    """Share of tensor-parallel communication that does not overlap with the products; less with async TP (fitted)."""
    cast_share: float = 0.48
    """Share of the memory bandwidth that casts to fp8 reach: they transpose and find the largest value (fitted)."""
    flash_share: float = 1.0
    """Speed of its flash attention relative to cuDNN's kernel."""
    ring_share: float = 1.0
    """Share of flash attention's rate that ring attention over context ranks reaches (fitted)."""
    fused_head: bool = False
    """The forward pass of the head computes its gradients too, with the loss."""
    waits_to_send: bool = False
    """Pipeline sends block compute instead of overlapping with it."""
    waits_to_receive: bool = False
    """Pipeline receives block too, and do not overlap with sends."""

    def on_host(self, slowness: float) -> Software:
        """The same program on a host that takes this many times as long as one with the default speed."""
        fsdp = "fsdp_forward", "fsdp_backward", "fsdp_gather", "fsdp_reduce"
        keys = "launch", "collective_launch", "routing_wait", *fsdp
        return self if slowness == 1.0 else replace(self, **{key: slowness * getattr(self, key) for key in keys})


# Counted: 2 norms, 4 products, 2 of attention, scale-mask-softmax, 2 dropouts, 2 residual additions, bias and GELU, and
# about as many views, splits, transposes and copies, which take host time too.
MEGATRON = Software(
    name="megatron",
    product_share=1.0,
    scores=True,
    score_bytes=4.0,
    stream_passes=11.0,
    head_passes=4.0,
    inner_passes=2.0,
    kernels=34,
    launch=24.4e-6,
    collective_launch=21e-6,
    logit_bytes=60.0,
    gradient_bytes=0,
    overlapped=False,
    optimizer_bytes=38.0,  # Adam reads 16 and writes 12, the cast to 16 bits moves 4 + 2, zeroing gradients 4.
    scattered=True,
    step_overhead=1.12e-3,
    bf16_sum_bytes=10.0,  # A separate kernel reads the sum (4) and the gradient (2) and writes the sum (4).
    split_softmax=14,
    fp16_bytes=4.0,  # The copy moves 2 + 4; zeroing moves 2 less.
    regathers=True,
    waits_to_send=True,
)
# The same layers under DeepSpeed's pipeline engine, in fp32: only Adam and zeroing. Its launches are slower (fitted).
DEEPSPEED = replace(
    MEGATRON,
    name="megatron-deepspeed",
    launch=31.7e-6,
    optimizer_bytes=32.0,
    logits_left=1,
    flat_gradients=True,
    waits_to_receive=True,
)
# Compiled: one kernel each for norms, activations and residual additions between products; flash attention. Counted:
# the first norm 2 passes over the stream, residual and second norm 4, the last residual 3; rotary positions and GELU a
# read and a write. The loss reads logits twice and writes gradients.
STEELYARD = Software(
    name="steelyard",
    product_share=0.935,
    scores=False,
    score_bytes=0.0,
    stream_passes=9.0,
    head_passes=2.0,
    inner_passes=2.0,
    kernels=20,
    launch=10e-6,
    collective_launch=40e-6,
    logit_bytes=6.0,
    gradient_bytes=4,
    overlapped=True,
    optimizer_bytes=34.0,
    scattered=False,
    step_overhead=0.7e-3,
    stops_early=True,
    fused_head=True,
    master_weights=True,
    fused_casts=True,
    # `plan measure` on two nodes with an H200: 190 and 110 small operations of the host in the passes of ZeRO 2 with
    # two micro-batches, and 250 for the routing. Hooks, gathers and reductions share the first two as on a CPU.
    fsdp_forward=0.75e-3,
    fsdp_backward=0.4e-3,
    fsdp_gather=1.5e-3,
    fsdp_reduce=0.5e-3,
    routing_wait=2.0e-3,
)
# The loss is not compiled and uses fp32 logits: cast 6, softmax 12, backward 4, 12 and 6. On Hopper it asks for
# FlashAttention 2 (torchtitan/models/attention.py): 335 TFLOP/s with heads of 128 on an H100, 0.65 of cuDNN's kernel as
# `compute.py` has it (arXiv 2407.08608, figure 5).
TORCHTITAN = replace(
    STEELYARD,
    name="torchtitan",
    product_share=0.81,
    flash_share=0.65,
    ring_share=0.68,
    logit_bytes=40.0,
    fused_head=False,
    per_op=True,
)
# TorchTitan without compiled layers. Counted: each norm moves 36 bytes per value, rotary embeddings 20.
TORCHTITAN_EAGER = replace(TORCHTITAN, stream_passes=46.0, head_passes=10.0, inner_passes=5.0, kernels=60)
ASYNC_TP = 0.48  # `exposed_exchange` of TorchTitan with async tensor parallelism (fitted)
TORCHTITAN_ASYNC_TP = replace(TORCHTITAN, exposed_exchange=ASYNC_TP)
# Steelyard without compiled layers.
EAGER = replace(STEELYARD, stream_passes=16.0, head_passes=6.0, inner_passes=3.0, kernels=45, fused_casts=False)
# What `--software` takes. Variants of a program keep its name: they run the same layouts with the same memory.
KNOWN = {
    "steelyard": STEELYARD,
    "megatron": MEGATRON,
    "megatron-deepspeed": DEEPSPEED,
    "torchtitan": TORCHTITAN,
    "torchtitan-async-tp": TORCHTITAN_ASYNC_TP,
}


def as_run(software: Software, recipe: Recipe, splits_backward: bool) -> Software:
    """The software as it trains a recipe: layers are compiled unless the recipe disables that or uses zero bubble.

    Zero bubble splits the backward pass, and a compiled layer would run the whole backward pass twice. Async tensor
    parallelism is a pass of the compiler.
    """
    compiled = recipe.train.compile if recipe.train.compile is not None else not splits_backward
    eager = {STEELYARD: EAGER, TORCHTITAN: TORCHTITAN_EAGER, TORCHTITAN_ASYNC_TP: TORCHTITAN_EAGER}
    return software if compiled else eager.get(software, software)
