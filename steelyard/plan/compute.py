"""How long a layer, the embedding, the head and the optimizer take on a GPU, from first principles.

A matrix product is cut into tiles, which the GPU's units work off in waves: a last wave that is not full costs as much
as a full one, which is why small products reach a smaller share of the peak. What is not a product moves bytes, at the
memory's bandwidth. And all of it must be started by the host: a layer that computes faster than the host can start its
kernels takes as long as the host does. `TILES`, `RAMP`, `MEMORY_SHARE` and `OVERLAP` are the only free numbers here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

from steelyard.core.recipe import Recipe
from steelyard.core.recipe.model_section import GptConfig
from steelyard.plan.cluster import Nodes
from steelyard.plan.software import Software
from steelyard.sizes.activations import FP32, working_bytes
from steelyard.sizes.gpu_catalogue import Gpu

# Rows and columns of a tile, and the share of the sustained rate that it reaches: small ones load more per product.
TILES = ((256, 128, 1.0), (128, 128, 0.95), (128, 64, 0.8), (64, 64, 0.65))
RAMP = 32  # A tile begins and ends as if its inner dimension were so much longer.
MEMORY_SHARE = 0.92  # of the data sheet's bandwidth that kernels reach
FLASH_SHARE = 0.55  # of the sustained rate that flash attention reaches: softmax is between its products
BATCHED_SHARE = 0.65  # of the same that the many small products of attention reach where scores are written out
FP8_SHARE = 0.75  # of the sustained rate that fp8 products reach
OVERLAP = 4.5  # Host and GPU run side by side, but wait for each other now and then: a norm of this order of both.


@dataclass(frozen=True)
class LayerDims:
    """A model's widths, whatever its family."""

    hidden: int
    query: int
    key: int
    heads: int
    head_dim: int
    ffn: int
    gated: bool
    rows: int
    """Of the embedding table, padding included."""
    layers: int
    sequence: int
    dropout: bool

    @classmethod
    def of(cls, recipe: Recipe) -> LayerDims:
        """Read off the recipe."""
        model = recipe.model
        gpt = isinstance(model, GptConfig)
        head_dim = model.hidden // model.heads if isinstance(model, GptConfig) else model.head_dim
        kv_heads = model.heads if isinstance(model, GptConfig) else model.kv_heads
        return cls(
            hidden=model.hidden,
            query=model.heads * head_dim,
            key=kv_heads * head_dim,
            heads=model.heads,
            head_dim=head_dim,
            ffn=model.ffn,
            gated=not gpt,
            rows=model.padded_vocab,
            layers=model.layers,
            sequence=recipe.data.sequence_length,
            dropout=model.attention_dropout > 0,
        )


@dataclass(frozen=True)
class Work:
    """What a rank computes with: its GPU, the program, the precision and its share of a micro-batch."""

    gpu: Gpu
    software: Software
    precision: str
    each: int
    micro_batch: int
    tensor: int
    context: int
    sequence_parallel: bool

    @classmethod
    def of(cls, recipe: Recipe, gpu: Gpu, software: Software, micro_batch: int, cut: tuple[int, int, bool]) -> Work:
        """A rank of a recipe; `cut` is tensor, context and sequence_parallel."""
        each = working_bytes(recipe)
        return cls(gpu, software, recipe.train.precision, each, micro_batch, *cut)

    @property
    def rate(self) -> float:
        """FLOP/s that large products keep up; those of fp8 wait for their inputs to be scaled and cast."""
        peak = self.gpu.peak(self.precision)
        assert peak is not None
        return peak * self.gpu.sustained * (FP8_SHARE if self.precision == "fp8" else 1.0)

    @property
    def wide(self) -> Work:
        """The same in bf16, where fp8 is not used: in attention and in the head."""
        return replace(self, precision="bf16") if self.precision == "fp8" else self

    @property
    def bandwidth(self) -> float:
        """Bytes per second that kernels reach."""
        assert self.gpu.bandwidth_gb is not None
        return self.gpu.bandwidth_gb * 1e9 * MEMORY_SHARE


@dataclass(frozen=True)
class Pass:
    """Seconds of one micro-batch's forward and backward pass: on the GPU, and of the host that starts it."""

    forward: float
    backward: float
    host_forward: float
    host_backward: float
    recompute: float
    """Seconds that computing again adds to the backward pass, if all of the forward pass is: on the GPU."""
    selective: float
    """The same where only attention's scores or pointwise functions are computed again."""


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


def linear(work: Work, tokens: int, inputs: int, outputs: int) -> tuple[float, float]:
    """Forward and backward seconds of a linear map: one product, then one each for inputs' and weights' gradients."""
    forward = product(work, tokens, outputs, inputs)
    return forward, product(work, tokens, inputs, outputs) + product(work, outputs, inputs, tokens)


@lru_cache(maxsize=65536)
def layer(work: Work, dims: LayerDims) -> Pass:
    """One transformer layer."""
    software, t = work.software, work.tensor
    tokens = work.micro_batch * dims.sequence // work.context
    maps = [
        (dims.hidden, (dims.query + 2 * dims.key) // t),
        (dims.query // t, dims.hidden),
        (dims.hidden, (2 if dims.gated else 1) * dims.ffn // t),
        (dims.ffn // t, dims.hidden),
    ]
    times = [linear(work, tokens, *one) for one in maps]
    products, gradients = sum(one[0] for one in times), sum(one[1] for one in times)
    attention, attention_back = _attention(work.wide, dims, tokens)
    along = t if work.sequence_parallel else 1
    inner = (2 * (dims.query + dims.key) + (1.5 if dims.gated else 1) * dims.ffn) / t
    moved = software.stream_passes * dims.hidden / along + software.inner_passes * inner
    pointwise = work.each * tokens * moved / work.bandwidth
    kernels = software.kernels + (0 if _softmax_is_one(work, dims) else _split(work))
    host = kernels * software.launch
    forward = products + attention + pointwise
    summed = software.bf16_sum_bytes * sum(inputs * outputs for inputs, outputs in maps) / work.bandwidth
    return Pass(
        forward=forward,
        backward=gradients + attention_back + 2 * pointwise + (summed if work.precision == "bf16" else 0.0),
        host_forward=host,
        host_backward=2 * host,
        recompute=forward - (times[-1][0] if software.stops_early else 0.0),
        selective=attention if software.scores else pointwise,
    )


def _attention(work: Work, dims: LayerDims, tokens: int) -> tuple[float, float]:
    """Seconds of the products with scores, and of what is done to the scores between."""
    heads = dims.heads // work.tensor
    rows = dims.sequence // work.context
    if not work.software.scores:
        flops = 2 * 2 * tokens * dims.sequence * heads * dims.head_dim / 2  # causal: half of the scores
        forward = flops / (work.rate * FLASH_SHARE * (work.software.ring_share if work.context > 1 else 1.0))
        return forward, 2.5 * forward  # Scores are computed again, then four products.
    batch = work.micro_batch * heads
    one = product(work, rows, dims.sequence, dims.head_dim, batch, BATCHED_SHARE)
    two = product(work, rows, dims.head_dim, dims.sequence, batch, BATCHED_SHARE)
    times = 1.0 if _softmax_is_one(work, dims) else 2.0 if work.precision == "fp32" else 3.0
    bytes_ = (work.software.score_bytes + (5.0 if dims.dropout else 0.0)) * times
    moved = batch * rows * dims.sequence * bytes_ * work.each / 2 / work.bandwidth
    return one + two + moved, 2 * (one + two) + moved


def _split(work: Work) -> int:
    """Kernels more of a softmax in pieces: in fp32 the mask alone, else scaling and casts too."""
    return 1 if work.precision == "fp32" else work.software.split_softmax


def _softmax_is_one(work: Work, dims: LayerDims) -> bool:
    """Whether mask and softmax are one kernel: Megatron has it for 16 bits and multiples of four heads.

    Else the mask is a pass of its own, and in 16 bits casts to fp32 and back are another.
    """
    if not work.software.split_softmax:
        return True
    return work.precision != "fp32" and work.micro_batch * (dims.heads // work.tensor) % 4 == 0


@lru_cache(maxsize=65536)
def embedding(work: Work, dims: LayerDims) -> Pass:
    """The look-up of tokens, and the scattered sum of its gradients."""
    tokens = work.micro_batch * dims.sequence // work.context
    forward = 6 * work.each * tokens * dims.hidden / work.bandwidth
    host = 8 * work.software.launch
    return Pass(forward, 2 * forward, host, host, 0.0, 0.0)


@lru_cache(maxsize=65536)
def head(work: Work, dims: LayerDims) -> Pass:
    """Final norm, logits and loss."""
    tokens = work.micro_batch * dims.sequence // work.context
    rows = dims.rows // work.tensor
    forward, backward = linear(work.wide, tokens, dims.hidden, rows)
    moved = tokens * rows * work.software.logit_bytes * work.each / 2 / work.bandwidth
    host = 20 * work.software.launch
    return Pass(forward + moved / 2, backward + moved / 2, host, host, 0.0, 0.0)


def together(host: float, gpu: float) -> float:
    """Seconds of work that the host starts and the GPU does side by side: the longer, and a little of the shorter."""
    longer, shorter = max(host, gpu), min(host, gpu)
    return float(longer * (1 + (shorter / longer) ** OVERLAP) ** (1 / OVERLAP)) if longer else 0.0


def host_optimizer(nodes: Nodes, ranks: int, states: int, parameters: float) -> float:
    """Seconds of the same in the host's memory: gradients go there and weights come back, both in fp32, one after the
    other; in between weights and states are read and written and gradients read, by all `ranks` of a node at once.
    """
    carried = 2 * FP32 * parameters / (nodes.host_link_GBps * 1e9)
    return carried + FP32 * (2 * (1 + states) + 1) * parameters * ranks / (nodes.host_GBps * 1e9)


def optimizer(work: Work, parameters: float) -> float:
    """Seconds of the update of so many parameters."""
    bytes_ = work.software.optimizer_bytes + (work.software.fp16_bytes if work.precision == "fp16" else 0.0)
    return bytes_ * parameters / work.bandwidth
