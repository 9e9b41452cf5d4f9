"""The time that weights cost a rank besides products: casts, the copies of FSDP around its collectives, gradient sums.

And the time that the host spends in FSDP: hooks, gathers and reductions.

Counted in `_fsdp_collectives.py` and `_fsdp_param.py` of torch, `model/modules.py` and `training/fp8.py`, for programs
with `Software.master_weights`. Megatron's sums are `Software.bf16_sum_bytes`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from steelyard.planning.compute import Work
from steelyard.planning.evidence import Factors
from steelyard.planning.software import Software
from steelyard.sizes.activations import FP32
from steelyard.sizes.gpu_catalogue import Gpu

# `torch.split_with_sizes_copy` copies gathered weights into place with 790 GB/s on an A100: 0.77 of its bandwidth, for
# a read and a write (github.com/pytorch/pytorch/pull/117203).
COPY_OUT_SHARE = 0.77
# `torch._chunk_cat` copies gradients into the buffer of a reduce-scatter. On an H100 it writes 260 to 278 billion fp32
# numbers per second, 500 in bf16 (github.com/pytorch/pytorch/pull/120678): by its bytes per multiprocessor.
CHUNK_CAT = 1.05e12 / 132


class WeightCopies(NamedTuple):
    """Seconds per micro-batch in a forward and in a backward pass."""

    forward: float = 0.0
    backward: float = 0.0


class RankCopies(NamedTuple):
    """Seconds per weight of layers, of embedding, norm and head, and of experts that expert parallelism divides."""

    layer: WeightCopies = WeightCopies()
    ends: WeightCopies = WeightCopies()
    experts: WeightCopies = WeightCopies()
    host: WeightCopies = WeightCopies()
    """Seconds of the host per layer."""

    def of_layer(self, weights: int, experts: int) -> float:
        """Seconds of the GPU for both passes of a layer with so many weights."""
        layer, own = self.layer, self.experts
        return weights * (layer[0] + layer[1]) + (experts * (own[0] + own[1]) if experts else 0.0)

    def scaled(self, factors: Factors | None) -> RankCopies:
        """The copies with measured factors."""
        if factors is None:
            return self
        return RankCopies(*(WeightCopies(ahead * factors.forward, back * factors.backward) for ahead, back in self))


class Rates(NamedTuple):
    """Bytes per second of a GPU: of kernels, of FSDP's two copies, and of casts to fp8."""

    kernels: float
    copy_out: float
    chunk_cat: float
    casts: float

    @classmethod
    def of(cls, gpu: Gpu, kernels: float, cast_share: float) -> Rates:
        """The rates of a GPU whose kernels reach `kernels` bytes per second."""
        assert gpu.bandwidth_gb is not None
        copy_out, chunk_cat = gpu.bandwidth_gb * 1e9 * COPY_OUT_SHARE, CHUNK_CAT * (gpu.units or 1)
        return cls(kernels, copy_out, chunk_cat, kernels * cast_share)


class Format(NamedTuple):
    """How products use weights: bytes of a weight and of its gradient."""

    each: int
    gradient: int
    fp8: str | None = None
    """Scaling of a product in fp8: "tensor" or "row"."""
    fused: bool = False
    """Without FSDP a product writes its gradient in the gradient's bytes, not in its own."""


@dataclass(frozen=True)
class WeightShards:
    """How the ranks along data and context hold weights, and for how many micro-batches."""

    ranks: int
    zero: int
    micro_batches: int
    pipeline: bool
    """In a pipeline FSDP gathers weights once per step, and reduces gradients once, after the last micro-batch."""

    @property
    def gathers(self) -> tuple[float, float]:
        """How often weights are gathered per micro-batch, in a forward and in a backward pass."""
        return (1.0, 1.0) if self.zero == 3 and not self.pipeline else (1 / self.micro_batches, 0.0)

    @property
    def reductions(self) -> float:
        """How often gradients are reduced per micro-batch."""
        return 1.0 if self.zero >= 2 and not self.pipeline else 1 / self.micro_batches

    def host(self, software: Software) -> WeightCopies:
        """Seconds of the host for a layer."""
        if self.ranks == 1:
            return WeightCopies()
        gather, reduce = software.fsdp_gather, software.fsdp_reduce
        ahead, back = self.gathers
        return WeightCopies(
            software.fsdp_forward + ahead * gather, software.fsdp_backward + back * gather + self.reductions * reduce
        )

    def copies(self, rates: Rates, format: Format) -> WeightCopies:
        """Seconds per weight: casts and gathers, then gradients, which are added to a sum and scattered."""
        each, gradient, several = format.each, format.gradient, self.micro_batches > 1
        forward, backward = self._fp8(rates, format)
        cast = FP32 + each if each != FP32 else 0
        if self.ranks == 1:
            own = gradient - each if format.fused else cast
            forward += 0.0 if format.fp8 else cast / rates.kernels
            # To add to a sum, both are read and the sum is written.
            return WeightCopies(forward, backward + (own + 3 * gradient * several) / rates.kernels)
        shards = self.ranks if self.zero else 1
        gather, chunk_cat = cast / shards / rates.kernels, gradient / rates.chunk_cat
        if shards > 1:
            gather += 2 * each / shards / rates.kernels + 2 * each / rates.copy_out
        else:
            chunk_cat += 2 * gradient / rates.kernels  # One shard is copied instead of scattered.
        if self.zero >= 2 and not self.pipeline:
            backward += chunk_cat + 3 * gradient * several / shards / rates.kernels
        else:
            # Whole gradients: the first is cast, others are added to it, and the sum is scattered.
            added = (each + gradient) + (self.micro_batches - 1) * (2 * gradient + each)
            backward += (added * several / rates.kernels + chunk_cat) / self.micro_batches
        ahead, back = self.gathers
        return WeightCopies(forward + ahead * gather, backward + back * gather)

    def _fp8(self, rates: Rates, format: Format) -> WeightCopies:
        """Seconds to scale and cast a weight to fp8, once per tensor and transposed later, or twice by row."""
        read = 2 * (FP32 if self.ranks == 1 else format.each) + 1
        seconds = {None: (0, 0), "tensor": (read, 2), "row": (2 * read, 0)}[format.fp8]
        return WeightCopies(*(bytes_ / rates.casts for bytes_ in seconds))


def rank_copies(work: Work, gradient: int, has_experts: bool, shards: WeightShards) -> RankCopies:
    """The copies on a GPU. Embedding, head and experts do not use fp8."""
    if not work.software.master_weights:
        return RankCopies()
    rates = Rates.of(work.gpu, work.bandwidth, work.software.cast_share)
    wide = Format(work.each, gradient, None, work.software.fused_casts)
    scaling = "row" if work.by_row else "tensor"
    layer = wide._replace(fp8=scaling) if work.precision == "fp8" and not has_experts else wide
    of_experts = replace(shards, ranks=shards.ranks // work.expert)
    return RankCopies(
        shards.copies(rates, layer),
        shards.copies(rates, wide),
        of_experts.copies(rates, wide._replace(fused=False)),
        shards.host(work.software),
    )


def alone(work: Work, has_experts: bool) -> WeightCopies:
    """The copies of a layer on one rank with one micro-batch."""
    return rank_copies(replace(work, expert=1), FP32, has_experts, WeightShards(1, 0, 1, False)).layer
