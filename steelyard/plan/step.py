"""The cost of one step as a function of its partition alone: a search for layers per stage asks it over and over.

`pipeline` turns the stages' seconds into a timetable; what follows the last backward pass (summing gradients, the
update) is added rank by rank, since early ones wait for late ones anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from steelyard.plan import compute, pipeline_sim
from steelyard.plan.communication import Ring
from steelyard.plan.compute import Work
from steelyard.plan.layout import Layout, Seat
from steelyard.plan.pipeline_sim import Times
from steelyard.sizes.memory import STATES

if TYPE_CHECKING:
    from steelyard.plan.predict import Predictor


@dataclass(frozen=True)
class Parts:
    """Seconds of a step, as the rank that is done last spends them."""

    compute: float
    bubble: float
    tensor: float
    pipeline: float
    gradient: float
    optimizer: float
    overhead: float

    @property
    def total(self) -> float:
        """All of them."""
        return float(sum(asdict(self).values()))


@dataclass(frozen=True)
class StageCost:
    """What a layer, the embedding and the head cost on the GPUs of one pipeline rank."""

    work: Work
    layer: Split
    embedding: Split
    head: Split


@dataclass(frozen=True)
class Split:
    """Seconds of one micro-batch: of the GPU and of the host, and how much of the GPU's is communication."""

    forward: float
    backward: float
    host_forward: float
    host_backward: float
    exchange: float
    weights: float
    """Of the backward seconds, those that only weights' gradients need."""


class StepCost:
    """A layout's step, but for the partition."""

    def __init__(
        self, predictor: Predictor, layout: Layout, costs: list[StageCost], send: tuple[float, ...], rings: list[Ring]
    ) -> None:
        self.predictor, self.layout, self.costs, self.send, self.rings = predictor, layout, costs, send, rings
        self.micro_batches = predictor.micro_batches(layout)
        self.plan = (layout.schedule, layout.pipeline, layout.virtual, self.micro_batches)

    def times(self, counts: tuple[int, ...]) -> Times:
        """Seconds of each stage's passes and of the sends between."""
        last, costs, seconds = len(counts) - 1, self.costs * self.layout.virtual, self.predictor.stage
        passes = [
            seconds(cost, layers, (stage == 0) + 2 * (stage == last))
            for stage, (cost, layers) in enumerate(zip(costs, counts, strict=True))
        ]
        forward, backward = map(list, zip(*passes, strict=True))
        weights, send = [0.0] * len(counts), self.send
        if self.layout.schedule == "zero-bubble" and last > 0:
            weights = [layers * cost.layer.weights for cost, layers in zip(costs, counts, strict=True)]
            backward = [back - late for back, late in zip(backward, weights, strict=True)]
        if self.predictor.software.waits_to_send:
            waits = [self._waits(stage) for stage in range(len(counts))]
            forward = [ahead + before for ahead, (before, _) in zip(forward, waits, strict=True)]
            backward = [back + behind for back, (_, behind) in zip(backward, waits, strict=True)]
            send = (0.0,) * len(send)
        return Times(tuple(forward), tuple(backward), tuple(weights), send)

    def _waits(self, stage: int) -> tuple[float, float]:
        """Seconds of a stage's forward and backward pass in which its rank computes nothing, but sends or receives."""
        software = self.predictor.software
        if not software.waits_to_send:
            return 0.0, 0.0
        next_ = self.send[stage] if stage < len(self.send) else 0.0
        before = self.send[stage - 1] if stage else 0.0
        return (next_ + before, next_ + before) if software.waits_to_receive else (next_, before)

    def per_layer(self) -> tuple[list[float], list[float]]:
        """Seconds of a micro-batch on each pipeline rank: for a layer, and for embedding and head beside the layers."""
        stage, last = self.predictor.stage, self.layout.pipeline - 1
        each = [sum(stage(cost, 1, 0)) for cost in self.costs]
        extra = [sum(stage(cost, 0, (rank == 0) + 2 * (rank == last))) for rank, cost in enumerate(self.costs)]
        return each, extra

    def _layout_of(self, rank: int) -> Layout:
        """The layout as a pipeline rank sees it."""
        return self.layout

    def _seats_of(self, rank: int) -> Sequence[Seat]:
        return self.predictor.seats(self.layout)[rank]

    def held(self, counts: tuple[int, ...], rank: int) -> int:
        """Parameters of a rank: its stages' layers, embedding and head, cut by tensor parallelism."""
        layout, model = self._layout_of(rank), self.predictor.recipe.model
        sizes = self.predictor.sizes(layout.tensor)
        held = sizes.layer * sum(counts[rank :: layout.pipeline])
        held += sizes.embedding if rank == 0 else 0
        if rank == layout.pipeline - 1:
            held += sizes.final_norm + sizes.head
            if model.tied and layout.pipeline > 1:
                held += model.padded_vocab * model.hidden // layout.tensor
        return held

    def after(self, counts: tuple[int, ...], times: Times, rank: int) -> tuple[float, float]:
        """Seconds of a pipeline rank after its last backward pass: gradients' sums, and the update."""
        layout, held = self._layout_of(rank), self.held(counts, rank)
        if self.predictor.software.overlapped and layout.pipeline == 1:
            gradient = self._exposed(times, held)
        else:
            gradient = self._gradient(rank, held)
        shards = layout.data * layout.context if layout.zero else 1
        return gradient, self._update(rank, held / shards)

    def _update(self, rank: int, parameters: float) -> float:
        """Seconds to update so many parameters on the GPU or, where the recipe says so, in the host's memory."""
        optim = self.predictor.recipe.optim
        if not optim.offload:
            return compute.optimizer(self.costs[rank].work, parameters)
        kinds = {seat.nodes.type: seat.nodes for seat in self._seats_of(rank)}.values()
        return max(compute.host_optimizer(nodes, nodes.gpus, STATES[optim.name], parameters) for nodes in kinds)

    def _gradient(self, rank: int, held: int) -> float:
        """Seconds to sum a pipeline rank's gradients over its data-parallel ranks, and to gather weights again."""
        predictor, ring, zero = self.predictor, self.rings[rank], self.layout.zero
        if zero == 0:
            return ring.all_reduce(self._gradient_bytes() * held)
        gathered = 0.0 if zero == 3 and self.layout.pipeline == 1 else ring.gather(predictor.each * held)
        return self._scattered(rank, held) + gathered

    def _scattered(self, rank: int, held: int) -> float:
        """Seconds to sum gradients so that each data-parallel rank keeps its share of the sums."""
        return self.rings[rank].gather(self._gradient_bytes() * held)

    def _gradient_bytes(self) -> int:
        predictor = self.predictor
        return predictor.software.gradient_bytes or (2 if predictor.recipe.train.precision == "fp16" else 4)

    def _exposed(self, times: Times, held: int) -> float:
        """Of summing gradients and gathering weights, what does not hide behind computing: at least one layer's share.

        zero 2 sums after every micro-batch and gathers weights once, zero 3 gathers each layer's twice in each of them.
        """
        zero, micro_batches = self.layout.zero, self.micro_batches
        seconds, hidden = self._gradient(0, held), times.backward[0]
        if zero >= 2:
            seconds, hidden = seconds + (micro_batches - 1) * self._scattered(0, held), hidden * micro_batches
        if zero == 3:
            seconds += 2 * micro_batches * self.rings[0].gather(self.predictor.each * held)
            hidden += times.forward[0] * micro_batches
        layers = max(1, self.predictor.dims.layers)
        return max(seconds - hidden * (layers - 1) / layers, seconds / layers)

    def seconds(self, counts: tuple[int, ...], settled: bool = False) -> float:
        """The whole step; `settled` lets a long one go on as it has begun, once it repeats itself (for searching)."""
        times = self.times(counts)
        ends = pipeline_sim.settled(times, *self.plan) if settled else pipeline_sim.simulate(times, *self.plan).ends
        after = (sum(self.after(counts, times, rank)) for rank in range(len(ends)))
        return max(end + more for end, more in zip(ends, after, strict=True)) + self.predictor.software.step_overhead

    def at_least(self, counts: tuple[int, ...]) -> float:
        """A bound from below for the step, without walking through its pipeline."""
        bound = pipeline_sim.at_least(self.times(counts), self.layout.pipeline, self.micro_batches)
        return bound + self.predictor.software.step_overhead

    def bound(self, layers: int) -> float:
        """A bound from below for the step under any partition of so many layers.

        A pipeline rank with k layers is not done before n micro-batches have had k layers each there, the first one has
        had its way through the ranks before, and the gradients of k layers are summed. How many layers fit into T
        seconds of that is a linear program; any solution of its dual bounds them, and one is found from the last rank
        backwards.
        """
        virtual, rounds = self.layout.virtual, self.micro_batches
        ways = virtual if virtual == 1 else 2 * virtual  # A rank's first stage may hold less than its share.
        late = self.layout.schedule == "zero-bubble"
        ways *= 3 if late else 1  # Only the forward pass, about a third of the work, must come before.
        kinds = self.predictor.kinds(self.layout)
        known = {kind: (least(self.costs[rank].layer), self._layer_after(rank)) for rank, kind in _first(kinds)}
        behind, weights = 0.0, [0.0] * len(kinds)
        for rank in range(len(kinds) - 1, -1, -1):
            each, after = known[kinds[rank]]
            weight = (1 - each / ways * behind) / (rounds * each + after)
            if weight > 0:
                weights[rank] = weight
                behind += weight
        first, last = _beside(self.costs[0], self.costs[0].embedding), _beside(self.costs[-1], self.costs[-1].head)
        taken = rounds * (weights[0] * first + weights[-1] * last)
        there = first / ways
        for rank in range(1, len(kinds)):
            there += self.send[rank - 1] * (1 if late else 2)
            taken += weights[rank] * there
        return (layers + taken) / behind + self.predictor.software.step_overhead

    def _layer_after(self, rank: int) -> float:
        """Seconds that a layer adds after the last backward pass, at the least.

        Not the update: while a rank updates, what it sent back is still on its way through the ranks before.
        """
        if self.layout.pipeline == 1:
            return 0.0
        held = self.predictor.sizes(self.layout.tensor).layer
        ring = self.rings[rank]
        shortest = min(ring.all_reduce(2 * held), ring.gather(4 * held))
        return shortest - ring.gather(0.0) * 2

    def parts(self, counts: tuple[int, ...]) -> Parts:
        """The step taken apart, as the rank that is done last sees it."""
        times = self.times(counts)
        table = pipeline_sim.simulate(times, *self.plan)
        ranks = range(self.layout.pipeline)
        after = [self.after(counts, times, rank) for rank in ranks]
        slowest = max(ranks, key=lambda rank: table.ends[rank] + sum(after[rank]))
        busy = table.busy[slowest]
        layers = sum(counts[slowest :: self.layout.pipeline])
        tensor = min(busy, self.micro_batches * layers * self.costs[slowest].layer.exchange)
        at_once = Times(times.forward, times.backward, times.weights, (0.0,) * len(times.send))
        bubble = pipeline_sim.simulate(at_once, *self.plan).ends[slowest] - busy
        stages = range(slowest, len(counts), self.layout.pipeline)
        waits = sum(sum(self._waits(stage)) for stage in stages)
        return Parts(
            compute=busy - tensor - self.micro_batches * waits,
            bubble=max(0.0, bubble),
            tensor=tensor,
            pipeline=max(0.0, table.ends[slowest] - busy - bubble) + self.micro_batches * waits,
            gradient=after[slowest][0],
            optimizer=after[slowest][1],
            overhead=self.predictor.software.step_overhead,
        )


def _first(kinds: list[int]) -> list[tuple[int, int]]:
    """The first rank of each kind."""
    return [(kinds.index(kind), kind) for kind in set(kinds)]


def least(split: Split) -> float:
    """Seconds of both passes at the least: where the host is slower it may be busy with other layers meanwhile."""
    return max(split.forward + split.backward, split.host_forward + split.host_backward)


def _beside(cost: StageCost, end: Split) -> float:
    """What embedding or head add, at the least, to a rank whose layers are bounded by `least`.

    Of the same kind as bounds the layers: seconds of a slow host and of a slow GPU pass side by side, and do not add.
    """
    layer = cost.layer
    if layer.host_forward + layer.host_backward > layer.forward + layer.backward:
        return end.host_forward + end.host_backward
    return end.forward + end.backward


def stage_seconds(cost: StageCost, layers: int, first: bool, last: bool) -> tuple[float, float]:
    """Forward and backward seconds of a stage with so many layers."""
    pieces = [(layers, cost.layer), (int(first), cost.embedding), (int(last), cost.head)]
    forward = sum(count * each.forward for count, each in pieces)
    backward = sum(count * each.backward for count, each in pieces)
    host_forward = sum(count * each.host_forward for count, each in pieces)
    host_backward = sum(count * each.host_backward for count, each in pieces)
    return compute.together(host_forward, forward), compute.together(host_backward, backward)
