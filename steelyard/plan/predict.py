"""How long a step of a recipe takes under a layout, and where the time goes.

Each pipeline rank's stages get their seconds from `compute` and `communication`, on the slowest GPU that the stage lies
on; `pipeline` turns them into a timetable; what follows the last backward pass (summing gradients, the update) is added
rank by rank, since early ones wait for late ones anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from steelyard.core.recipe import Recipe
from steelyard.plan import communication, compute, pipeline
from steelyard.plan.cluster import Cluster
from steelyard.plan.communication import Ring
from steelyard.plan.compute import Pass, Shape, Work
from steelyard.plan.layout import Layout, Seat, Seats
from steelyard.plan.pipeline import Times
from steelyard.plan.software import STEELYARD, Software
from steelyard.sizes.gpus import Gpu
from steelyard.sizes.model import Parameters, parameters


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

    gpu: Gpu
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
    exchange_forward: float
    exchange_backward: float
    weights: float
    """Of the backward seconds, those that only weights' gradients need."""


class Predictor:
    """Costs of one recipe on one cluster; a layout's stage costs are kept, for many layouts share them."""

    def __init__(self, recipe: Recipe, cluster: Cluster, software: Software = STEELYARD) -> None:
        self.recipe, self.cluster, self.software = recipe, cluster, software
        self.shape = Shape.of(recipe)
        self._costs: dict[tuple[object, ...], StageCost] = {}
        self._seats: dict[tuple[tuple[str, int], ...], Seats] = {}
        self._parameters: dict[int, Parameters] = {}

    def seats(self, layout: Layout) -> list[tuple[Seat, ...]]:
        """The nodes of each pipeline rank."""
        if layout.placement not in self._seats:
            self._seats[layout.placement] = Seats(self.cluster, layout.placement)
        placed, ranks = self._seats[layout.placement], layout.stage_ranks
        return [placed.of(stage * ranks, ranks) for stage in range(layout.pipeline)]

    def micro_batches(self, layout: Layout) -> int:
        """Of a step, for one data-parallel rank."""
        return self.recipe.train.global_batch // (layout.micro_batch * layout.data)

    def costs(self, layout: Layout, seats: Sequence[Seat]) -> StageCost:
        """What a pipeline rank's layers cost on its GPUs, the slowest of them setting the pace."""
        types = tuple(sorted({(seat.nodes.type, seat.ranks) for seat in seats}))
        key = (types, len(seats) > 1, layout.tensor, layout.context, layout.micro_batch,
               layout.sequence_parallel, layout.recompute)  # fmt: skip
        if key not in self._costs:
            kinds = {seat.nodes.type: seat for seat in seats}.values()
            each = [self._cost(layout, seat, seats) for seat in kinds]
            self._costs[key] = max(each, key=lambda cost: cost.layer.forward + cost.layer.backward)
        return self._costs[key]

    def _cost(self, layout: Layout, seat: Seat, seats: Sequence[Seat]) -> StageCost:
        gpu = self.cluster.gpu_of(seat.nodes)
        cut = (layout.tensor, layout.context, layout.sequence_parallel)
        work = Work.of(self.recipe, gpu, self.software, layout.micro_batch, cut)
        tensor = group(self.cluster, seats, 1, layout.tensor)
        context = group(self.cluster, seats, layout.tensor, layout.context)
        tokens = layout.micro_batch * self.shape.sequence // layout.context
        stream = work.each * tokens * self.shape.hidden
        keys = 2 * work.each * tokens * layout.context * self.shape.key / layout.tensor
        sum_ = tensor.all_reduce(stream)
        gathered = context.gather(keys)
        launch = self.software.collective_launch * (layout.tensor > 1)
        layer, again = compute.layer(work, self.shape), layout.recompute
        repeated = layer.recompute if again == "full" else layer.selective if again == "selective" else 0.0
        host_again = layer.host_forward + 2 * launch if again == "full" else 0.0
        sums_again = 2 * sum_ + gathered if again == "full" else 0.0
        weights = layer.forward  # One product of three in each map, and the rest is small.
        return StageCost(
            gpu,
            Split(
                forward=layer.forward + 2 * sum_ + gathered,
                backward=layer.backward + repeated + 2 * sum_ + 2 * gathered + sums_again,
                host_forward=layer.host_forward + 2 * launch,
                host_backward=layer.host_backward + 2 * launch + host_again,
                exchange_forward=2 * sum_ + gathered,
                exchange_backward=2 * sum_ + 2 * gathered + sums_again,
                weights=weights,
            ),
            _ends(compute.embedding(work, self.shape), sum_ / 2, 0.0, launch),
            _ends(compute.head(work, self.shape), 0.0, sum_, launch),
        )

    def times(self, layout: Layout) -> tuple[Times, list[StageCost]]:
        """Seconds of each stage's passes and of the sends between."""
        seats = self.seats(layout)
        costs = [self.costs(layout, each) for each in seats]
        stages = layout.pipeline * layout.virtual
        last = stages - 1
        split = layout.schedule == "zero-bubble" and stages > 1
        forward, backward, weights = [], [], []
        for stage, layers in enumerate(layout.partition):
            cost = costs[stage % layout.pipeline]
            ahead, back = stage_seconds(cost, layers, stage == 0, stage == last)
            late = layers * cost.layer.weights if split else 0.0
            forward.append(ahead)
            backward.append(back - late)
            weights.append(late)
        send = [self._send(layout, seats[stage % layout.pipeline], seats[(stage + 1) % layout.pipeline])
                for stage in range(last)]  # fmt: skip
        return Times(tuple(forward), tuple(backward), tuple(weights), tuple(send)), costs

    def _send(self, layout: Layout, one: Sequence[Seat], other: Sequence[Seat]) -> float:
        """Seconds from one stage to the next: the slowest pair, all of a node's ranks sending at once."""
        tokens = layout.micro_batch * self.shape.sequence // layout.context
        bytes_ = (4 if self.recipe.train.precision == "fp32" else 2) * tokens * self.shape.hidden
        if layout.sequence_parallel or self.software.scattered:
            bytes_ //= layout.tensor
        pairs = {(a.nodes.type, b.nodes.type, a.node == b.node, a.ranks): (a, b)
                 for a, b in zip(one, other, strict=False)}  # fmt: skip
        pairs[one[-1].nodes.type, other[-1].nodes.type, one[-1].node == other[-1].node, one[-1].ranks] = (
            one[-1], other[-1],
        )  # fmt: skip
        return max(communication.send(self.cluster, a, b, bytes_, a.ranks) for a, b in pairs.values())

    def held(self, layout: Layout, rank: int) -> int:
        """Parameters of a rank: its stages' layers, embedding and head, cut by tensor parallelism."""
        if layout.tensor not in self._parameters:
            self._parameters[layout.tensor] = parameters(self.recipe.model, layout.tensor, padded=True)
        sizes = self._parameters[layout.tensor]
        held = sizes.layer * sum(layout.partition[rank :: layout.pipeline])
        held += sizes.embedding if rank == 0 else 0
        if rank == layout.pipeline - 1:
            held += sizes.final_norm + sizes.head
            if self.recipe.model.tied and layout.pipeline > 1:
                held += self.shape.rows * self.shape.hidden // layout.tensor
        return held

    def gradient_seconds(self, layout: Layout, rank: int, seats: Sequence[Seat]) -> float:
        """Seconds to sum a pipeline rank's gradients over its data-parallel ranks, and to gather weights again."""
        ring = group(self.cluster, seats, layout.tensor, layout.data * layout.context)
        each = self.software.gradient_bytes or (2 if self.recipe.train.precision == "fp16" else 4)
        held = self.held(layout, rank)
        if layout.zero == 0:
            return ring.all_reduce(each * held)
        working = 4 if self.recipe.train.precision == "fp32" else 2
        gathered = 0.0 if layout.zero == 3 and layout.pipeline == 1 else ring.gather(working * held)
        return ring.gather(each * held) + gathered

    def parts(self, layout: Layout) -> Parts:
        """The step, part by part."""
        micro_batches = self.micro_batches(layout)
        times, costs = self.times(layout)
        seats = self.seats(layout)
        plan = (layout.schedule, layout.pipeline, layout.virtual, micro_batches)
        table = pipeline.simulate(times, *plan)
        after = [self.after(layout, rank, seats[rank], costs[rank], times) for rank in range(layout.pipeline)]
        ends = [end + gradient + update for end, (gradient, update) in zip(table.ends, after, strict=True)]
        slowest = max(range(layout.pipeline), key=lambda rank: ends[rank])
        gradient, update = after[slowest]
        busy = table.busy[slowest]
        tensor = micro_batches * sum(
            layers * (costs[slowest].layer.exchange_forward + costs[slowest].layer.exchange_backward)
            for layers in layout.partition[slowest :: layout.pipeline]
        )
        at_once = Times(times.forward, times.backward, times.weights, (0.0,) * len(times.send))
        bubble = pipeline.simulate(at_once, *plan).ends[slowest] - busy if layout.pipeline > 1 else 0.0
        return Parts(
            compute=busy - min(tensor, busy),
            bubble=bubble,
            tensor=min(tensor, busy),
            pipeline=table.ends[slowest] - busy - bubble,
            gradient=gradient,
            optimizer=update,
            overhead=self.software.step_overhead,
        )

    def after(
        self, layout: Layout, rank: int, seats: Sequence[Seat], cost: StageCost, times: Times
    ) -> tuple[float, float]:
        """Seconds of a pipeline rank after its last backward pass: gradients' sums, and the update."""
        gradient = self.gradient_seconds(layout, rank, seats)
        if self.software.overlapped and layout.pipeline == 1:
            gradient = self._exposed(layout, seats, times)
        work = Work.of(self.recipe, cost.gpu, self.software, layout.micro_batch, (layout.tensor, 1, False))
        shards = layout.data * layout.context if layout.zero else 1
        return gradient, compute.optimizer(work, self.held(layout, rank) / shards)

    def _exposed(self, layout: Layout, seats: Sequence[Seat], times: Times) -> float:
        """Of summing gradients and gathering weights, what does not hide behind computing: at least one layer's share.

        zero 2 sums after every micro-batch, zero 3 also gathers each layer's weights twice in each of them.
        """
        micro_batches = self.micro_batches(layout)
        seconds = self.gradient_seconds(layout, 0, seats)
        hidden = times.backward[0]
        if layout.zero >= 2:
            seconds, hidden = seconds * micro_batches, hidden * micro_batches
        if layout.zero == 3:
            ring = group(self.cluster, seats, layout.tensor, layout.data * layout.context)
            each = 4 if self.recipe.train.precision == "fp32" else 2
            seconds += 2 * micro_batches * ring.gather(each * self.held(layout, 0))
            hidden += times.forward[0] * micro_batches
        layers = max(1, layout.partition[0])
        return max(seconds - hidden * (layers - 1) / layers, seconds / layers)

    def at_least(self, layout: Layout) -> float:
        """A bound from below for the step, without walking through its pipeline."""
        times, _ = self.times(layout)
        bound = pipeline.at_least(times, layout.pipeline, self.micro_batches(layout))
        return bound + self.software.step_overhead


def stage_seconds(cost: StageCost, layers: int, first: bool, last: bool) -> tuple[float, float]:
    """Forward and backward seconds of a stage with so many layers."""
    pieces = [(layers, cost.layer), (int(first), cost.embedding), (int(last), cost.head)]
    forward = sum(count * each.forward for count, each in pieces)
    backward = sum(count * each.backward for count, each in pieces)
    host_forward = sum(count * each.host_forward for count, each in pieces)
    host_backward = sum(count * each.host_backward for count, each in pieces)
    return compute.together(host_forward, forward), compute.together(host_backward, backward)


def _ends(cost: Pass, exchange_forward: float, exchange_backward: float, launch: float) -> Split:
    return Split(
        cost.forward + exchange_forward,
        cost.backward + exchange_backward,
        cost.host_forward + launch,
        cost.host_backward + launch,
        exchange_forward,
        exchange_backward,
        0.0,
    )


def group(cluster: Cluster, seats: Sequence[Seat], stride: int, size: int) -> Ring:
    """The slowest ring of `size` ranks, `stride` apart, among the ranks of a stage."""
    if size == 1:
        return Ring(1, 1.0, 0.0)
    span = stride * size
    fitting = [seat for seat in seats if seat.ranks >= span]
    if len(fitting) == len(seats):  # Every ring lies within a node.
        slowest = min(fitting, key=lambda seat: cluster.inside(seat.nodes).bandwidth)
        return communication.ring(cluster, [slowest], size, 1)
    # A ring spans nodes: those of a node are as many as it has ranks, or as there are rings.
    rings = max(min(stride, seat.ranks) for seat in seats)
    return communication.ring(cluster, _spanned(seats, span), size, rings)


def _spanned(seats: Sequence[Seat], span: int) -> Sequence[Seat]:
    """Seats that one ring reaches: all of a stage's for data parallelism, a window of them for smaller groups."""
    total = sum(seat.ranks for seat in seats)
    if span >= total:
        return seats
    count = max(2, -(-span * len(seats) // total))
    kinds = {seat.nodes.type: seat for seat in seats}
    return [*kinds.values(), *seats][: max(count, len(kinds))]
