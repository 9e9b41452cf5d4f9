"""The time of a layer, the embedding and the head on one GPU, from first principles.

A matrix product is split into tiles, which the streaming multiprocessors process in waves. A partial last wave costs as
much as a full one, so small products reach a smaller share of the peak. Everything else is bound by memory bandwidth.
The host launches every kernel: a layer whose kernels finish faster than the host launches them takes as long as the
host. `RAMP`, `BATCHED_SHARE` and `OVERLAP` are the only fitted constants in this file. docs/plan.md has a table of all
constants.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

from steelyard.core.recipe import Recipe
from steelyard.planning.layer_dims import ExpertDims, LayerDims
from steelyard.planning.software import Software
from steelyard.sizes.activations import FP32, working_bytes
from steelyard.sizes.gpu_catalogue import Gpu

# Rows and columns of a tile, as cuBLAS has them, and the share of the sustained rate that it reaches (estimates): small
# tiles load more per FLOP.
TILES = ((256, 128, 1.0), (128, 128, 0.95), (128, 64, 0.8), (64, 64, 0.65))
RAMP = 70  # The prologue and epilogue of a tile cost as much as this many steps of the inner dimension.
MEMORY_SHARE = 0.9  # share of the data sheet's bandwidth that kernels reach: copies on the H200, 4.3 of 4.8 TB/s
# Flash attention: products reach FLASH_PEAK of the peak, then a multiprocessor computes EXPONENTIALS per second, and a
# causal row costs as much as FLASH_TOKENS more tokens. On an H100 this is the published forward speed of cuDNN's kernel
# with heads of 64 and 128 and 1,024 to 16,384 tokens, within 7% (arXiv 2407.08608, figure 5: 288 to 388 and 410 to 539
# TFLOP/s). Wider heads are no faster: 422 TFLOP/s with 256 on an H200.
FLASH_PEAK, EXPONENTIALS, FLASH_TOKENS, FLASH_WIDEST = 0.8, 23.4e9, 350, 128
BATCHED_SHARE = 0.54  # the same for the batched products of attention that writes its scores to memory
# Share of `sustained` that products of other inputs reach, published for the H200: 1453 of 1979 TFLOP/s in fp8
# (ml-engineering, as in the catalogue), and in TF32 about four fifths, because a value has twice the bytes.
NARROW, TF32 = 0.92, 0.8
# Counted in model/experts.py and parallel/expert_parallel.py: reads and writes of a row of each slot in a forward pass,
# to gather tokens, to bring outputs into the order of tokens, to weight and sum them; and to sort received slots.
SLOT_PASSES, EXCHANGE_PASSES = 8, 4
EXPERT_KERNELS = 30  # of routing, sorting and statistics in a forward pass, counted there too
EMBEDDING_KERNELS, HEAD_KERNELS = 8, 20  # of one pass: lookup, positions, dropout; norm, logits and loss
EMBEDDING_PASSES = 6  # reads and writes of the stream in the forward pass of the embedding
FLASH_BACKWARD = 2.5  # times the forward FLOPs: the scores are recomputed, then four products
LOSS_CHUNK = 1 << 31  # bytes of logits that the fused loss computes at once, in model/loss.py
PLAIN_LOGIT_BYTES = 44.0  # of model/loss.py: cast 6, largest 4, difference 8, exponential 8, sum 4, gradient 14
OVERLAP = 4.2  # Host and GPU overlap with some waiting: their time is the p-norm of both with this p.


@dataclass(frozen=True)
class Work:
    """What determines the compute time of a rank: GPU, software, precision and its share of a micro-batch."""

    gpu: Gpu
    software: Software
    precision: str
    each: int
    micro_batch: int
    tensor: int
    context: int
    sequence_parallel: bool
    expert: int = 1
    by_row: bool = False
    """fp8 has one scale per row."""
    imbalance: float = 1.0
    """Slots of the busiest expert rank relative to an even load; a slot is a token with one of its experts."""

    @classmethod
    def of(cls, recipe: Recipe, gpu: Gpu, software: Software, micro_batch: int, cut: tuple[int, int, bool]) -> Work:
        """The work of a rank of a recipe; `cut` is (tensor, context, sequence_parallel)."""
        by_row = recipe.train.fp8_scaling == "row"
        return cls(gpu, software, recipe.train.precision, working_bytes(recipe), micro_batch, *cut, by_row=by_row)

    @property
    def rate(self) -> float:
        """FLOP/s that large products of the training program sustain."""
        peak = self.gpu.peak(self.precision)
        assert peak is not None
        kind = TF32 if self.precision == "fp32" and self.gpu.tf32 is not None else 1.0
        kind = NARROW if self.precision == "fp8" else kind
        return peak * self.gpu.sustained * self.software.product_share * kind

    @property
    def wide(self) -> Work:
        """The same in bf16 for attention, experts and the head, which do not use fp8."""
        return self.at("bf16") if self.precision == "fp8" else self

    def at(self, precision: str) -> Work:
        """The work in another precision, or in its own if a cluster file does not give the GPU's peak for the other."""
        return self if self.gpu.peak(precision) is None else replace(self, precision=precision)

    @property
    def bandwidth(self) -> float:
        """Bytes per second that kernels reach."""
        assert self.gpu.bandwidth_gb is not None
        return self.gpu.bandwidth_gb * 1e9 * MEMORY_SHARE


@dataclass(frozen=True)
class Pass:
    """Seconds of the forward and backward pass of one micro-batch, on the GPU and on the host that launches it."""

    forward: float
    backward: float
    host_forward: float
    host_backward: float
    recompute: float
    """GPU seconds that full recomputation adds to the backward pass."""
    selective: float
    """The same for selective recomputation: attention scores or pointwise functions only."""


def product(work: Work, rows: int, columns: int, inner: int, batch: int = 1, share: float = 1.0) -> float:
    """Seconds of `batch` products of rows x inner by inner x columns."""
    units = work.gpu.units or 1
    unit_rate = work.rate / units * share
    best = math.inf
    for tall, wide, tile_share in TILES:
        tiles = batch * -(-rows // tall) * -(-columns // wide)
        pieces = max(1, min(units // tiles, inner // 1024)) if tiles < units else 1
        waves = -(-tiles * pieces // units)
        seconds = waves * 2 * tall * wide * (inner / pieces + RAMP) / (unit_rate * tile_share)
        best = min(best, seconds)
    moved = work.each * batch * (rows * inner + inner * columns + rows * columns)
    return max(best, moved / work.bandwidth)


def linear(work: Work, tokens: int, inputs: int, outputs: int, batch: int = 1) -> tuple[float, float]:
    """Forward and backward seconds of `batch` linear maps: one product forward, one each for both gradients."""
    forward = product(work, tokens, outputs, inputs, batch)
    backward = product(work, tokens, inputs, outputs, batch) + product(work, outputs, inputs, tokens, batch)
    if work.precision != "fp8":
        return forward, backward
    # Each value is read to find the largest one, and read again to be scaled and cast. With one scale per tensor inputs
    # are transposed for the backward pass, and gradients are written twice; per row, both are scaled twice.
    per_value = batch * tokens / (work.bandwidth * work.software.cast_share)
    read = 2 * work.each + 1
    ahead, back = (2 * read, 2 * read) if work.by_row else (read, read + 1)
    transposed = 0 if work.by_row else 2 * inputs
    return forward + per_value * ahead * inputs, backward + per_value * (back * outputs + transposed)


@lru_cache(maxsize=65536)
def layer(work: Work, dims: LayerDims) -> Pass:
    """The passes of one transformer layer; the mean over all layers if some have experts and others an MLP."""
    if dims.experts is None or dims.experts.layers_share == 1.0:
        return _layer(work, dims)
    share = dims.experts.layers_share
    pairs = zip(
        vars(_layer(work, dims)).values(), vars(_layer(work, replace(dims, experts=None))).values(), strict=True
    )
    return Pass(*(share * experts + (1 - share) * dense for experts, dense in pairs))


def _layer(work: Work, dims: LayerDims) -> Pass:
    """The passes of a layer with experts, or of a layer with an MLP."""
    software, t, experts = work.software, work.tensor, dims.experts
    tokens = work.micro_batch * dims.sequence // work.context
    ffn = dims.ffn if experts is None else experts.shared_ffn
    maps = [
        (dims.hidden, (dims.query + 2 * dims.key) // t),
        (dims.query // t, dims.hidden),
        (dims.hidden, (2 if dims.gated else 1) * ffn // t),
        (ffn // t, dims.hidden),
    ]
    times = [linear(work, tokens, *one) for one in maps if min(one)]
    if experts is not None:
        times += _experts(work, dims, experts, tokens)
        ffn += experts.top_k * experts.ffn
    products, gradients = sum(one[0] for one in times), sum(one[1] for one in times)
    attention, attention_back = _attention(work.wide, dims, tokens)
    along = t if work.sequence_parallel else 1
    heads = software.head_passes * (dims.query + dims.key) if dims.rotary or software.scores else 0.0
    inner = heads + software.inner_passes * (1.5 if dims.gated else 1) * ffn
    moved = software.stream_passes * dims.hidden / along + inner / t
    if experts is not None:
        moved += (SLOT_PASSES + (EXCHANGE_PASSES if work.expert > 1 else 0)) * experts.top_k * dims.hidden
    pointwise = work.each * tokens * moved / work.bandwidth
    kernels = software.kernels + (0 if _softmax_is_one(work, dims) else _split(work))
    kernels += 0 if experts is None else EXPERT_KERNELS
    host = kernels * software.launch
    forward = products + attention + pointwise
    summed = software.bf16_sum_bytes * sum(inputs * outputs for inputs, outputs in maps) / work.bandwidth
    again = _products_again(times, dims) if software.per_op else 0.0
    return Pass(
        forward=forward,
        backward=gradients + attention_back + 2 * pointwise + (summed if work.precision == "bf16" else 0.0),
        host_forward=host,
        host_backward=2 * host,
        recompute=forward - (times[-1][0] if software.stops_early else 0.0),
        selective=attention if software.scores else pointwise + again,
    )


def _products_again(times: list[tuple[float, float]], dims: LayerDims) -> float:
    """Seconds of the products that selective recomputation computes again if it keeps every second one."""
    columns, output, hidden = (each[0] for each in times[:3])
    if not dims.gated:
        return output
    return columns * dims.key / (dims.query + 2 * dims.key) + output + hidden / 2  # key, output and up


def _experts(work: Work, dims: LayerDims, experts: ExpertDims, tokens: int) -> list[tuple[float, float]]:
    """Forward and backward seconds of the router and of the experts of a rank, their last projection at the end.

    A rank computes as many slots as it has, whatever the expert degree, with fewer experts. The busiest rank computes
    more of them, and its products are those of all its experts at an even load among them.
    """
    here, imbalance = experts.experts // work.expert, work.imbalance if work.expert > 1 else 1.0
    rows = max(1, round(tokens * experts.top_k * imbalance / here))
    inner = experts.ffn // work.tensor
    router = linear(replace(work.at("fp32"), each=FP32), tokens, dims.hidden, experts.experts)
    work = work.wide
    return [router, linear(work, rows, dims.hidden, 2 * inner, here), linear(work, rows, inner, dims.hidden, here)]


def _attention(work: Work, dims: LayerDims, tokens: int) -> tuple[float, float]:
    """Forward and backward seconds of attention: its two products, and what is applied to the scores between them."""
    heads = dims.heads // work.tensor
    rows = dims.sequence // work.context
    if not work.software.scores:
        flops = 2 * 2 * tokens * dims.sequence * heads * dims.head_dim / 2  # causal: half of the scores
        forward = flops / _flash_rate(work, dims)
        return forward, FLASH_BACKWARD * forward
    batch = work.micro_batch * heads
    one = product(work, rows, dims.sequence, dims.head_dim, batch, BATCHED_SHARE)
    two = product(work, rows, dims.head_dim, dims.sequence, batch, BATCHED_SHARE)
    times = 1.0 if _softmax_is_one(work, dims) else 2.0 if work.precision == "fp32" else 3.0
    bytes_ = (work.software.score_bytes + (5.0 if dims.dropout else 0.0)) * times
    moved = batch * rows * dims.sequence * bytes_ * work.each / 2 / work.bandwidth
    return one + two + moved, 2 * (one + two) + moved


def _flash_rate(work: Work, dims: LayerDims) -> float:
    """FLOP/s of flash attention. It draws less power than products, but is no faster."""
    peak = work.gpu.peak(work.precision)
    assert peak is not None
    width, software = min(dims.head_dim, FLASH_WIDEST), work.software
    per_flop = 1 / (FLASH_PEAK * peak) + 1 / (4 * width * EXPONENTIALS * (work.gpu.units or 1))
    rate = software.product_share * software.flash_share / per_flop / (1 + FLASH_TOKENS / dims.sequence)
    return min(rate, work.rate) * (software.ring_share if work.context > 1 else 1.0)


def _split(work: Work) -> int:
    """Additional kernels of an unfused softmax: in fp32 the mask, otherwise also scaling and casts."""
    return 1 if work.precision == "fp32" else work.software.split_softmax


def _softmax_is_one(work: Work, dims: LayerDims) -> bool:
    """Whether mask and softmax are one kernel: Megatron has one for 16 bits and multiples of four heads.

    Otherwise the mask is a separate pass, and in 16 bits the casts to fp32 and back are another.
    """
    if not work.software.split_softmax:
        return True
    return work.precision != "fp32" and work.micro_batch * (dims.heads // work.tensor) % 4 == 0


@lru_cache(maxsize=65536)
def embedding(work: Work, dims: LayerDims) -> Pass:
    """The embedding lookup, and the scatter-add of its gradients."""
    tokens = work.micro_batch * dims.sequence // work.context
    forward = EMBEDDING_PASSES * work.each * tokens * dims.hidden / work.bandwidth
    host = EMBEDDING_KERNELS * work.software.launch
    return Pass(forward, 2 * forward, host, host, 0.0, 0.0)


@lru_cache(maxsize=65536)
def head(work: Work, dims: LayerDims) -> Pass:
    """The final norm, the logits and the loss."""
    tokens = work.micro_batch * dims.sequence // work.context
    rows = dims.rows // work.tensor
    forward, backward = linear(work.wide, tokens, dims.hidden, rows)
    # The kernel of the fused loss needs the whole vocabulary on a rank.
    is_plain = work.software.fused_head and work.tensor > 1
    bytes_ = PLAIN_LOGIT_BYTES if is_plain else work.software.logit_bytes
    moved = tokens * rows * bytes_ * work.each / 2 / work.bandwidth
    host = HEAD_KERNELS * work.software.launch
    if work.software.fused_head:
        # The gradient of the weights is summed in fp32 over chunks, and scaled.
        chunks = -(-tokens * rows * work.each // LOSS_CHUNK)
        moved += 2 * FP32 * chunks * rows * dims.hidden / work.bandwidth
        return Pass(forward + backward + moved, 0.0, 2 * host, 0.0, 0.0, 0.0)
    return Pass(forward + moved / 2, backward + moved / 2, host, host, 0.0, 0.0)


def together(host: float, gpu: float) -> float:
    """Seconds of work that the host launches while the GPU runs: the longer of both, and a part of the shorter."""
    longer, shorter = max(host, gpu), min(host, gpu)
    return float(longer * (1 + (shorter / longer) ** OVERLAP) ** (1 / OVERLAP)) if longer else 0.0
