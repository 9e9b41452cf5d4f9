"""The time of one training step, computed from a table of plain numbers.

`predict.py` fills a `CostTable` with everything that does not depend on the partition: seconds of a layer, the
embedding and the head on each pipeline rank, parameter counts, ring costs and send times. `StepCost` combines the table
with the number of layers per stage, so that a search over partitions evaluates the same table many times.
`pipeline_sim` gives the end of each rank's last backward pass. Gradient reduction and the optimizer update follow and
are added per rank, because ranks that finish early wait for late ones anyway.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import NamedTuple

from steelyard.planning import compute, pipeline_sim
from steelyard.planning.communication import Ring
from steelyard.planning.pipeline_sim import Times
from steelyard.planning.update_cost import UpdateCost


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
    _known: dict[tuple[int, int], tuple[float, float]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def passes(self, layers: int, end: int = 0) -> tuple[float, float]:
        """Forward and backward seconds of a stage; `end` is 1 for the first stage, 2 for the last, 3 for the only one.

        Results are cached, because a search evaluates the same few stages in thousands of layouts.
        """
        key = (layers, end)
        if key not in self._known:
            units = [(layers, self.layer), (end & 1, self.embedding), (end >> 1, self.head)]
            forward = sum(count * each.forward for count, each in units)
            backward = sum(count * each.backward for count, each in units)
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
    expert_rings: tuple[Ring, ...] = ()
    """Ranks that hold the same experts, if expert parallelism divides them."""
    expert_shards: int = 1
    """Ranks that share the optimizer state of these experts."""
    matrix_bytes: int = 0
    """Bytes of the matrices of a layer that the optimizer brings to one rank each."""
    stage_ranks: int = 1
    """Ranks that share one pipeline rank, and its updates of whole matrices."""


class StepCost:
    """The time of a step as a function of the layers per stage."""

    def __init__(self, table: CostTable) -> None:
        self.table = table
        self.plan = (table.schedule, table.pipeline, table.virtual, table.micro_batches)
        self.splits = table.schedule == "zero-bubble" and table.pipeline * table.virtual > 1
        free = (0.0,) * len(table.send)
        self.send = free if table.waits_to_send else table.send
        self.receive = table.send if table.waits_to_send and table.waits_to_receive else ()
        # A search asks for these thousands of times: passes by stage and layers, and what follows by rank and layers.
        self._stages: list[dict[int, tuple[float, float, float]]] = [{} for _ in range(table.pipeline * table.virtual)]
        self._after: dict[tuple[int, int], tuple[float, float]] = {}

    def times(self, counts: tuple[int, ...]) -> Times:
        """Seconds of each stage's passes and of the sends between stages."""
        forward, backward, weights = zip(*self._passes(counts), strict=True)
        return Times(forward, backward, weights, self.send, self.receive)

    def _passes(self, counts: tuple[int, ...]) -> list[tuple[float, float, float]]:
        """Seconds of each stage's forward and backward pass, and of the weight gradients if these are split off."""
        known, found = self._stages, []
        for stage, layers in enumerate(counts):
            passes = known[stage].get(layers)
            if passes is None:
                passes = known[stage][layers] = self._stage(stage, layers)
            found.append(passes)
        return found

    def _stage(self, stage: int, layers: int) -> tuple[float, float, float]:
        cost = self.table.stages[stage % self.table.pipeline]
        forward, backward = cost.passes(layers, (stage == 0) + 2 * (stage == len(self._stages) - 1))
        weights = layers * cost.layer.weights if self.splits else 0.0
        ahead, behind = self._waits(stage)
        return forward + ahead, backward - weights + behind, weights

    def _waits(self, stage: int) -> tuple[float, float]:
        """Seconds of a stage's forward and backward pass during which its rank is blocked by a send."""
        table = self.table
        if not table.waits_to_send:
            return 0.0, 0.0
        next_ = table.send[stage] if stage < len(table.send) else 0.0
        return next_, table.send[stage - 1] if stage else 0.0

    def per_layer(self) -> tuple[list[float], list[float]]:
        """Seconds per micro-batch on each pipeline rank: of one layer, and of the embedding and head without layers."""
        costs, last = self.table.stages, self.table.pipeline - 1
        each = [sum(cost.passes(1)) for cost in costs]
        extra = [sum(cost.passes(0, (rank == 0) + 2 * (rank == last))) for rank, cost in enumerate(costs)]
        return each, extra

    def held(self, counts: tuple[int, ...], rank: int) -> int:
        """Parameters on a rank: the layers of its stages, the embedding and the head."""
        return sum(self._held(counts, rank))

    def _held(self, counts: tuple[int, ...], rank: int) -> tuple[int, int]:
        """Parameters on a rank that are not divided by expert parallelism, and those that are."""
        params, layers = self.table.params[rank], sum(counts[rank :: self.table.pipeline])
        return params.layer * layers + params.ends, params.experts * layers

    def after(self, counts: tuple[int, ...], times: Times, rank: int) -> tuple[float, float]:
        """Seconds of a pipeline rank after its last backward pass: gradient reduction, and the optimizer update."""
        key = (rank, sum(counts[rank :: self.table.pipeline]))
        if self.table.pipeline == 1 or key not in self._after:
            self._after[key] = self._after_passes(counts, times, rank)
        return self._after[key]

    def _after_passes(self, counts: tuple[int, ...], times: Times, rank: int) -> tuple[float, float]:
        table, held = self.table, self._held(counts, rank)
        if table.overlaps_gradients and table.pipeline == 1:
            gradient = self._exposed(times, held)
        else:
            gradient = self._gradient(rank, held)
        parameters = held[0] / table.shards[rank] + held[1] / table.expert_shards
        layers = sum(counts[rank :: table.pipeline])
        slowest = max(update.seconds(parameters, layers / table.stage_ranks) for update in table.stages[rank].update)
        # Shards of matrices go to their owners and results back; ranks that hold all only gather the results.
        ways = 1 if table.shards[rank] == 1 else 2 / table.shards[rank]
        bytes_ = table.matrix_bytes * layers
        return gradient, slowest + (ways * table.rings[rank].gather(bytes_) if bytes_ else 0.0)

    def _gradient(self, rank: int, held: tuple[int, int]) -> float:
        """Seconds to reduce a rank's gradients over its data-parallel group, and to all-gather sharded weights."""
        table = self.table
        if table.zero == 0:
            rings = self._rings_of(rank, held)
            return sum(ring.all_reduce(table.gradient_bytes * each) for ring, each in rings)
        gathered = 0.0 if table.zero == 3 and table.pipeline == 1 else self._gathered(rank, held, table.weight_bytes)
        return self._scattered(rank, held) + gathered

    def _scattered(self, rank: int, held: tuple[int, int]) -> float:
        """Seconds to reduce-scatter a rank's gradients."""
        return self._gathered(rank, held, self.table.gradient_bytes)

    def _gathered(self, rank: int, held: tuple[int, int], bytes_: int) -> float:
        """Seconds to all-gather, or reduce-scatter, a rank's parameters at `bytes_` bytes each."""
        return sum(ring.gather(bytes_ * each) for ring, each in self._rings_of(rank, held))

    def _rings_of(self, rank: int, held: tuple[int, int]) -> list[tuple[Ring, int]]:
        """The groups that share parameters of a rank, and the number of these parameters."""
        both = zip((self.table.rings[rank], *self.table.expert_rings[rank : rank + 1]), held, strict=False)
        return [(ring, each) for ring, each in both if each or ring is self.table.rings[rank]]

    def _exposed(self, times: Times, held: tuple[int, int]) -> float:
        """Gradient reduction and weight gathers that do not overlap with compute: at least the share of one layer.

        ZeRO 2 reduces after every micro-batch and gathers the weights once per step. ZeRO 3 gathers each layer twice
        per micro-batch.
        """
        table, micro_batches = self.table, self.table.micro_batches
        seconds, hidden = self._gradient(0, held), times.backward[0]
        if table.zero >= 2:
            seconds, hidden = seconds + (micro_batches - 1) * self._scattered(0, held), hidden * micro_batches
        if table.zero == 3:
            seconds += 2 * micro_batches * self._gathered(0, held, table.weight_bytes)
            hidden += times.forward[0] * micro_batches
        layers = max(1, table.layers)
        return max(seconds - hidden * (layers - 1) / layers, seconds / layers)

    def seconds(self, counts: tuple[int, ...], settled: bool = False) -> float:
        """The time of the step. `settled` extrapolates a long step from its first rounds, for use in a search."""
        times = self.times(counts)
        simulated = pipeline_sim.settled if settled else pipeline_sim.simulated_ends
        ends = simulated(times, *self.plan)
        after = (sum(self.after(counts, times, rank)) for rank in range(len(ends)))
        return max(end + more for end, more in zip(ends, after, strict=True)) + self.table.overhead

    def at_least(self, counts: tuple[int, ...]) -> float:
        """A lower bound for the step that needs no simulation."""
        table, passes = self.table, self._passes(counts)
        bound = pipeline_sim.at_least(passes, self.send, self.receive, table.pipeline, table.micro_batches)
        return bound + table.overhead

    def bound(self, layers: int) -> float:
        """A lower bound for the step over all partitions of `layers` layers.

        A pipeline rank with k layers finishes no earlier than the time for all micro-batches to pass its k layers, plus
        the time for the first micro-batch to arrive, plus the reduction of the gradients of k layers. The number of
        layers that fit into T seconds under these constraints is a linear program. Any feasible solution of its dual
        gives an upper bound for that number; this one is built from the last rank to the first.
        """
        table = self.table
        virtual, rounds, kinds = table.virtual, table.micro_batches, table.kinds
        ways = virtual if virtual == 1 else 2 * virtual  # A rank's first stage may hold less than its share.
        late = table.schedule == "zero-bubble"
        ways *= 3 if late else 1  # Only the forward pass, about a third of the work, must come before.
        firsts = [(kinds.index(kind), kind) for kind in set(kinds)]
        known = {kind: (table.stages[rank].layer.least, self._layer_after(rank)) for rank, kind in firsts}
        behind, weights = 0.0, [0.0] * len(kinds)
        for rank in range(len(kinds) - 1, -1, -1):
            each, after = known[kinds[rank]]
            weight = (1 - each / ways * behind) / (rounds * each + after)
            if weight > 0:
                weights[rank] = weight
                behind += weight
        first = table.stages[0].end_seconds(table.stages[0].embedding)
        last = table.stages[-1].end_seconds(table.stages[-1].head)
        taken = rounds * (weights[0] * first + weights[-1] * last)
        there = first / ways
        for rank in range(1, len(kinds)):
            there += table.send[rank - 1] * (1 if late else 2)
            taken += weights[rank] * there
        return (layers + taken) / behind + table.overhead

    def _layer_after(self, rank: int) -> float:
        """The least time that one layer adds after the last backward pass.

        The optimizer update is excluded: while a rank updates, the gradients that it sent are still passing through the
        ranks before it.
        """
        if self.table.pipeline == 1:
            return 0.0
        held, ring = self.table.params[rank].layer, self.table.rings[rank]
        shortest = min(ring.all_reduce(2 * held), ring.gather(4 * held))
        return shortest - ring.gather(0.0) * 2

    def parts(self, counts: tuple[int, ...]) -> Parts:
        """The step by part, on the rank that finishes last."""
        table, times = self.table, self.times(counts)
        timetable = pipeline_sim.simulate(times, *self.plan)
        ranks = range(table.pipeline)
        after = [self.after(counts, times, rank) for rank in ranks]
        slowest = max(ranks, key=lambda rank: timetable.ends[rank] + sum(after[rank]))
        busy = timetable.busy[slowest]
        layers = sum(counts[slowest :: table.pipeline])
        layer = table.stages[slowest].layer
        tensor = min(busy, table.micro_batches * layers * layer.exchange)
        expert = min(busy - tensor, table.micro_batches * layers * layer.expert)
        free_sends = replace(times, send=(0.0,) * len(times.send))
        bubble = pipeline_sim.simulate(free_sends, *self.plan).ends[slowest] - busy
        waits = sum(sum(self._waits(stage)) for stage in range(slowest, len(counts), table.pipeline))
        waits *= 2 if table.waits_to_receive else 1  # What a rank sends to its neighbours, it receives from them.
        return Parts(
            compute=busy - tensor - expert - table.micro_batches * waits,
            bubble=max(0.0, bubble),
            tensor=tensor,
            pipeline=max(0.0, timetable.ends[slowest] - busy - bubble) + table.micro_batches * waits,
            gradient=after[slowest][0],
            optimizer=after[slowest][1],
            overhead=table.overhead,
            expert=expert,
        )
