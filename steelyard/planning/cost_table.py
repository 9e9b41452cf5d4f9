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
    def host_share(self) -> float:
        """By how much both passes take longer if the host takes longer, relative to each other."""
        passes = (self.host_forward, self.forward), (self.host_backward, self.backward)
        both = [(compute.together(host, gpu), host) for host, gpu in passes]
        seconds = sum(together for together, _ in both)
        late = sum(together * (host / together) ** compute.OVERLAP for together, host in both if together)
        return float(late / seconds)

    @property
    def least(self) -> float:
        """A lower bound for both passes: a slow host may overlap with the GPU work of other layers."""
        return max(self.forward + self.backward, self.host_forward + self.host_backward)

    @property
    def least_on_links(self) -> float:
        """The same for all-to-alls that take no time: their links depend on nodes that are not chosen yet."""
        return max(self.forward + self.backward - self.expert, self.host_forward + self.host_backward)


@dataclass(frozen=True)
class StageCost:
    """The cost of a layer, the embedding and the head on the GPUs of one pipeline rank."""

    layer: UnitCost
    embedding: UnitCost
    head: UnitCost
    update: tuple[UpdateCost, ...]
    """The optimizer update on each type of node of the rank; the slowest one counts."""
    _known: dict[tuple[int, int, tuple[float, float]], tuple[float, float]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def passes(self, layers: int, end: int = 0, copies: tuple[float, float] = (0.0, 0.0)) -> tuple[float, float]:
        """Forward and backward seconds of a stage; `end` is 1 for the first stage, 2 for the last, 3 for the only one.

        `copies` are GPU seconds of its weights besides products. Results are cached, because a search evaluates the
        same few stages in thousands of layouts.
        """
        key = (layers, end, copies)
        if key not in self._known:
            units = [(layers, self.layer), (end & 1, self.embedding), (end >> 1, self.head)]
            forward = copies[0] + sum(count * each.forward for count, each in units)
            backward = copies[1] + sum(count * each.backward for count, each in units)
            host_forward = sum(count * each.host_forward for count, each in units)
            host_backward = sum(count * each.host_backward for count, each in units)
            self._known[key] = compute.together(host_forward, forward), compute.together(host_backward, backward)
        return self._known[key]

    def end_seconds(self, end: UnitCost) -> float:
        """The least that the embedding or the head adds to a rank whose layers are bounded by `UnitCost.least`.

        It is host time where the host bounds the layers and GPU time elsewhere: the two overlap and do not add up.
        """
        layer = self.layer
        if layer.host_forward + layer.host_backward > layer.forward + layer.backward:
            return end.host_forward + end.host_backward
        return end.forward + end.backward


class PassCopies(NamedTuple):
    """Seconds of the weights of a layer, and of embedding, norm and head, in a forward and in a backward pass."""

    forward: float
    backward: float
    ends_forward: float
    ends_backward: float

    @classmethod
    def of(cls, params: RankParams, copies: RankCopies) -> PassCopies:
        """The seconds of a rank's parameters."""
        layer, ends, experts = copies
        return cls(
            params.layer * layer.forward + params.experts * experts.forward,
            params.layer * layer.backward + params.experts * experts.backward,
            params.ends * ends.forward,
            params.ends * ends.backward,
        )


class RankParams(NamedTuple):
    """Parameters on one pipeline rank, divided by tensor parallelism: of one layer, and of embedding, norm and head.

    Of layers that differ it is the mean.
    """

    layer: int
    ends: int
    experts: int = 0
    """Experts of one layer that expert parallelism divides; `layer` does not include them."""


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
