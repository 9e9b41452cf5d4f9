"""The numbers that the time of a step is computed from: seconds, parameters, rings and sends of every pipeline rank."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import NamedTuple

from steelyard.planning import compute
from steelyard.planning.communication import Ring
from steelyard.planning.update_cost import UpdateCost
from steelyard.planning.weight_copies import RankCopies


@dataclass(frozen=True)
class Parts:
    """Seconds of a step by part, on the rank that finishes last."""

    compute: float
    bubble: float
    tensor: float
    pipeline: float
    gradient: float
    optimizer: float
    overhead: float
    expert: float = 0.0
    """All-to-alls of expert parallelism."""

    @property
    def total(self) -> float:
        """The sum of all parts."""
        return float(sum(asdict(self).values()))


@dataclass(frozen=True)
class UnitCost:
    """Seconds of one micro-batch in one layer, the embedding or the head, on the GPU and on the host."""

    forward: float
    backward: float
    host_forward: float
    host_backward: float
    exchange: float
    """GPU seconds of both passes that are tensor- or context-parallel communication."""
    weights: float
    """Seconds of the backward pass that only the weight gradients need."""
    expert: float = 0.0
    """GPU seconds of both passes that are all-to-alls of expert parallelism."""

    @property
    def gpu(self) -> float:
        """Seconds of the GPU in both passes."""
        return self.forward + self.backward

    @property
    def host(self) -> float:
        """Seconds of the host in both passes."""
        return self.host_forward + self.host_backward


StageCopies = tuple[float, float, float, float]
"""What the weights of a stage cost besides products: forward and backward seconds of the GPU, and of the host."""
NO_COPIES: StageCopies = (0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True)
class StageCost:
    """The cost of a layer, the embedding and the head on the GPUs of one pipeline rank."""

    layer: UnitCost
    embedding: UnitCost
    head: UnitCost
    update: tuple[UpdateCost, ...]
    """The optimizer update on each type of node of the rank; the slowest one counts."""
    _known: dict[tuple[int, int, StageCopies], tuple[float, float]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def passes(self, layers: int, end: int = 0, copies: StageCopies = NO_COPIES) -> tuple[float, float]:
        """Forward and backward seconds of a stage; `end` is 1 for the first stage, 2 for the last, 3 for the only one.

        Results are cached, because a search evaluates the same few stages in thousands of layouts.
        """
        key = (layers, end, copies)
        if key not in self._known:
            units = [(layers, self.layer), (end & 1, self.embedding), (end >> 1, self.head)]
            forward = copies[0] + sum(count * each.forward for count, each in units)
            backward = copies[1] + sum(count * each.backward for count, each in units)
            host_forward = copies[2] + sum(count * each.host_forward for count, each in units)
            host_backward = copies[3] + sum(count * each.host_backward for count, each in units)
            self._known[key] = compute.together(host_forward, forward), compute.together(host_backward, backward)
        return self._known[key]

    def host_share(self, copies: StageCopies) -> float:
        """By how much both passes of a layer take longer if the host takes longer, relative to each other."""
        hosts = self.layer.host_forward + copies[2], self.layer.host_backward + copies[3]
        passes = list(zip(hosts, self.passes(1, 0, copies), strict=True))
        late = sum(seconds * (host / seconds) ** compute.OVERLAP for host, seconds in passes if seconds)
        return float(late / sum(seconds for _, seconds in passes))


class RankParams(NamedTuple):
    """Parameters on one pipeline rank, divided by tensor parallelism: of one layer, and of embedding, norm and head.

    Of layers that differ it is the mean.
    """

    layer: int
    ends: int
    experts: int = 0
    """Experts of one layer that expert parallelism divides; `layer` does not include them."""

    def copies(self, copies: RankCopies, layers: int, has_end: bool) -> StageCopies:
        """What the weights of a stage cost besides products."""
        layer, ends, experts, host = copies
        forward = layers * (self.layer * layer.forward + self.experts * experts.forward)
        backward = layers * (self.layer * layer.backward + self.experts * experts.backward)
        if has_end:
            forward, backward = forward + self.ends * ends.forward, backward + self.ends * ends.backward
        return forward, backward, layers * host.forward, layers * host.backward


@dataclass(frozen=True)
class CostTable:
    """Everything that determines the time of a step except the partition. Tuples have one entry per pipeline rank."""

    schedule: str
    pipeline: int
    virtual: int
    micro_batches: int
    zero: int
    layers: int
    """Layers of the model."""
    stages: tuple[StageCost, ...]
    kinds: tuple[int, ...]
    """Ranks with the same number have the same costs."""
    rings: tuple[Ring, ...]
    """The data-parallel group, which reduces gradients."""
    params: tuple[RankParams, ...]
    shards: tuple[int, ...]
    """Ranks that share the optimizer state."""
    send: tuple[float, ...]
    """Seconds from each stage to the next one; one entry per pair of neighbouring stages."""
    weight_bytes: int
    gradient_bytes: int
    overlaps_gradients: bool
    """Gradient reduction overlaps with the backward pass."""
    waits_to_send: bool
    waits_to_receive: bool
    overhead: float
    """Fixed seconds per step."""
    copies: tuple[RankCopies, ...] = ()
    """Seconds per weight and micro-batch besides products."""
    expert_rings: tuple[Ring, ...] = ()
    """Ranks that hold the same experts, if expert parallelism divides them."""
    expert_shards: int = 1
    """Ranks that share the optimizer state of these experts."""
    matrix_bytes: int = 0
    """Bytes of the matrices of a layer that the optimizer brings to one rank each."""
    stage_ranks: int = 1
    """Ranks that share one pipeline rank, and its updates of whole matrices."""
