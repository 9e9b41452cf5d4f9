"""How long a step of a recipe takes under a layout, and where the time goes.

Each pipeline rank's stages get their seconds from `compute` and `communication`, on the slowest GPU that the stage lies
on; `pipeline` turns them into a timetable; what follows the last backward pass (summing gradients, the update) is added
rank by rank, since early ones wait for late ones anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

from steelyard.core.recipe import Recipe
from steelyard.plan import communication, compute, pipeline
from steelyard.plan.cluster import Cluster
from steelyard.plan.communication import Ring
from steelyard.plan.compute import Pass, Shape, Work
from steelyard.plan.layout import Layout, Placement, Seat, Seats
from steelyard.plan.pipeline import Times
from steelyard.plan.profile import Profile
from steelyard.plan.software import STEELYARD, Software
from steelyard.sizes.gpus import Gpu
from steelyard.sizes.model import Parameters, parameters

T = TypeVar("T")


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


@dataclass(frozen=True)
class Stands:
    """The seats of each pipeline rank, and numbers for ranks and for links to the next rank that cost the same."""

    seats: list[tuple[Seat, ...]]
    kinds: list[int]
    links: list[int]


class Predictor:
    """Costs of one recipe on one cluster. What many layouts share is kept."""

    def __init__(
        self,
        recipe: Recipe,
        cluster: Cluster,
        software: Software = STEELYARD,
        profiles: Sequence[Profile] = (),
    ) -> None:
        self.recipe, self.cluster, self.software = recipe, cluster, software
        self.profiles = {profile.gpu: profile for profile in profiles}
        self.shape = Shape.of(recipe)
        self.each = 4 if recipe.train.precision == "fp32" else 2
        self._costs: dict[tuple[object, ...], dict[int, StageCost]] = {}
        self._costs_on: dict[tuple[object, ...], StageCost] = {}
        self._sends: dict[tuple[object, ...], dict[int, float]] = {}
        self._rings: dict[tuple[object, ...], dict[int, Ring]] = {}
        self._seats: dict[Placement, Seats] = {}
        self._placed: dict[tuple[Placement, int, int], Stands] = {}
        self._numbers: dict[tuple[object, ...], int] = {}
        self._examples: list[Any] = []
        self._parameters: dict[int, Parameters] = {}
        self._stages: dict[tuple[int, int, int], tuple[float, float]] = {}

    def stage(self, cost: StageCost, layers: int, end: int) -> tuple[float, float]:
        """Forward and backward seconds of a stage; `end` is 1 for the first, 2 for the last, 3 for the only one."""
        key = (id(cost), layers, end)
        if key not in self._stages:
            self._stages[key] = stage_seconds(cost, layers, bool(end & 1), bool(end & 2))
        return self._stages[key]

    def seats(self, layout: Layout) -> list[tuple[Seat, ...]]:
        """The nodes of each pipeline rank."""
        return self._stands(layout).seats

    def kinds(self, layout: Layout) -> list[int]:
        """A number for each pipeline rank; ranks with the same one cost the same."""
        return self._stands(layout).kinds

    def _stands(self, layout: Layout) -> Stands:
        key = (layout.placement, layout.pipeline, layout.stage_ranks)
        if key not in self._placed:
            if layout.placement not in self._seats:
                self._seats[layout.placement] = Seats(self.cluster, layout.placement)
            placed, ranks = self._seats[layout.placement], layout.stage_ranks
            seats = [placed.of(stage * ranks, ranks) for stage in range(layout.pipeline)]
            kinds = [self._intern(_kinds(each), each) for each in seats]
            links = [self._intern(_link(one, seats[(rank + 1) % len(seats)]), (one, seats[(rank + 1) % len(seats)]))
                     for rank, one in enumerate(seats)]  # fmt: skip
            self._placed[key] = Stands(seats, kinds, links)
        return self._placed[key]

    def _intern(self, key: tuple[object, ...], example: Any) -> int:
        """A number for all ranks, or all neighbours, whose costs are the same, with one of them as an example."""
        if key not in self._numbers:
            self._numbers[key] = len(self._examples)
            self._examples.append(example)
        return self._numbers[key]

    @staticmethod
    def least(cost: StageCost) -> float:
        """Seconds of a layer's two passes at the least."""
        return _least(cost.layer)

    def micro_batches(self, layout: Layout) -> int:
        """Of a step, for one data-parallel rank."""
        return self.recipe.train.global_batch // (layout.micro_batch * layout.data)

    def step(self, layout: Layout) -> StepCost:
        """Everything about a layout's step that does not depend on its partition."""
        stands = self._stands(layout)
        cut = (layout.tensor, layout.context, layout.micro_batch, layout.sequence_parallel)
        columns = layout.data * layout.context
        costs = self._each(self._costs, (cut, layout.recompute), stands.kinds, lambda seats: self._cost(layout, seats))
        send = self._each(self._sends, cut, stands.links, lambda pair: self._send(layout, *pair))
        rings = self._each(
            self._rings, (layout.tensor, columns), stands.kinds,
            lambda seats: group(self.cluster, seats, layout.tensor, columns),
        )  # fmt: skip
        return StepCost(self, layout, costs, tuple((send * layout.virtual)[:-1]), rings)

    def _each(
        self, kept: dict[tuple[object, ...], dict[int, T]], how: tuple[object, ...], numbers: list[int],
        made: Callable[[Any], T],
    ) -> list[T]:  # fmt: skip
        """One value for each number, made once from its example."""
        known = kept.setdefault(how, {})
        for number in set(numbers):
            if number not in known:
                known[number] = made(self._examples[number])
        return [known[number] for number in numbers]

    def seconds(self, layout: Layout) -> float:
        """The whole step, not taken apart."""
        return self.step(layout).seconds(layout.partition)

    def parts(self, layout: Layout) -> Parts:
        """The step, part by part."""
        return self.step(layout).parts(layout.partition)

    def costs(self, layout: Layout) -> list[StageCost]:
        """What each pipeline rank's layers cost on its GPUs."""
        return self.step(layout).costs

    def _cost(self, layout: Layout, seats: Sequence[Seat]) -> StageCost:
        """The cost on the slowest of the GPUs, which sets the pace."""
        kinds = {seat.nodes.type: seat.nodes for seat in seats}.values()
        tensor = group(self.cluster, seats, 1, layout.tensor)
        context = group(self.cluster, seats, layout.tensor, layout.context)
        each = [self._cost_on(layout, self.cluster.gpu_of(nodes), tensor, context) for nodes in kinds]
        return max(each, key=lambda cost: cost.layer.forward + cost.layer.backward)

    def _cost_on(self, layout: Layout, gpu: Gpu, tensor: Ring, context: Ring) -> StageCost:
        key = (gpu.name, tensor, context, layout.micro_batch, layout.sequence_parallel, layout.recompute)
        if key not in self._costs_on:
            self._costs_on[key] = self._new_cost(layout, gpu, tensor, context)
        return self._costs_on[key]

    def _new_cost(self, layout: Layout, gpu: Gpu, tensor: Ring, context: Ring) -> StageCost:
        cut = (layout.tensor, layout.context, layout.sequence_parallel)
        work = Work.of(self.recipe, gpu, self.software, layout.micro_batch, cut)
        tokens = layout.micro_batch * self.shape.sequence // layout.context
        sum_ = tensor.all_reduce(self.each * tokens * self.shape.hidden)
        keys = 2 * self.each * tokens * layout.context * self.shape.key / layout.tensor
        gathered = context.gather(keys)
        launch = self.software.collective_launch * (layout.tensor > 1)
        layer, full = self._measured(work), layout.recompute == "full"
        sums_again = 2 * sum_ + gathered if full else 0.0
        return StageCost(
            work,
            Split(
                forward=layer.forward + 2 * sum_ + gathered,
                backward=layer.backward + 2 * sum_ + 2 * gathered + sums_again + _again(layer, layout.recompute),
                host_forward=layer.host_forward + 2 * launch,
                host_backward=layer.host_backward + 2 * launch + (layer.host_forward + 2 * launch if full else 0.0),
                exchange=4 * sum_ + 3 * gathered + sums_again,
                weights=layer.forward,  # One product of three in each map; the rest is small.
            ),
            _ends(compute.embedding(work, self.shape), sum_ / 2, 0.0, launch),
            _ends(compute.head(work, self.shape), 0.0, sum_, launch),
        )

    def _measured(self, work: Work) -> Pass:
        """A layer's passes as reckoned, or, where its GPU was profiled, scaled by the nearest measurement."""
        layer = compute.layer(work, self.shape)
        profile = self.profiles.get(work.gpu.name)
        if profile is None:
            return layer
        found = profile.nearest(work.tensor, work.micro_batch)
        same = replace(work, tensor=found.tensor, micro_batch=found.micro_batch, context=1, sequence_parallel=False)
        known = compute.layer(same, self.shape)
        ahead = found.forward / compute.together(known.host_forward, known.forward)
        back = found.backward / compute.together(known.host_backward, known.backward)
        return Pass(
            forward=layer.forward * ahead,
            backward=layer.backward * back,
            host_forward=layer.host_forward * ahead,
            host_backward=layer.host_backward * back,
            recompute=layer.recompute * ahead,
            selective=layer.selective * ahead,
        )

    def _send(self, layout: Layout, one: Sequence[Seat], other: Sequence[Seat]) -> float:
        """Seconds from one stage to the next: the slowest pair, all of a node's ranks sending at once."""
        cut = layout.tensor if layout.sequence_parallel or self.software.scattered else 1
        tokens = layout.micro_batch * self.shape.sequence // layout.context
        bytes_ = self.each * tokens * self.shape.hidden / cut
        return max(communication.send(self.cluster, a, b, bytes_, a.ranks) for a, b in _pairs(one, other))

    def sizes(self, tensor: int) -> Parameters:
        """Parameters by part that one of `tensor` ranks holds."""
        if tensor not in self._parameters:
            self._parameters[tensor] = parameters(self.recipe.model, tensor, padded=True)
        return self._parameters[tensor]


class StepCost:
    """The cost of a step as a function of the partition alone: a search for layers per stage asks it over and over."""

    def __init__(
        self, predictor: Predictor, layout: Layout, costs: list[StageCost], send: tuple[float, ...], rings: list[Ring]
    ) -> None:
        self.predictor, self.layout, self.costs, self.send, self.rings = predictor, layout, costs, send, rings
        self.micro_batches = predictor.micro_batches(layout)
        self.plan = (layout.schedule, layout.pipeline, layout.virtual, self.micro_batches)

    def times(self, counts: tuple[int, ...]) -> Times:
        """Seconds of each stage's passes and of the sends between."""
        layout, last = self.layout, len(counts) - 1
        split = layout.schedule == "zero-bubble" and last > 0
        forward, backward, weights = [], [], []
        for stage, layers in enumerate(counts):
            cost = self.costs[stage % layout.pipeline]
            ahead, back = self.predictor.stage(cost, layers, (stage == 0) + 2 * (stage == last))
            late = layers * cost.layer.weights if split else 0.0
            forward.append(ahead)
            backward.append(back - late)
            weights.append(late)
        return Times(tuple(forward), tuple(backward), tuple(weights), self.send)

    def held(self, counts: tuple[int, ...], rank: int) -> int:
        """Parameters of a rank: its stages' layers, embedding and head, cut by tensor parallelism."""
        layout, model = self.layout, self.predictor.recipe.model
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
        layout, held = self.layout, self.held(counts, rank)
        if self.predictor.software.overlapped and layout.pipeline == 1:
            gradient = self._exposed(times, held)
        else:
            gradient = self._gradient(rank, held)
        shards = layout.data * layout.context if layout.zero else 1
        return gradient, compute.optimizer(self.costs[rank].work, held / shards)

    def _gradient(self, rank: int, held: int) -> float:
        """Seconds to sum a pipeline rank's gradients over its data-parallel ranks, and to gather weights again."""
        predictor, ring, zero = self.predictor, self.rings[rank], self.layout.zero
        each = predictor.software.gradient_bytes or (2 if predictor.recipe.train.precision == "fp16" else 4)
        if zero == 0:
            return ring.all_reduce(each * held)
        gathered = 0.0 if zero == 3 and self.layout.pipeline == 1 else ring.gather(predictor.each * held)
        return ring.gather(each * held) + gathered

    def _exposed(self, times: Times, held: int) -> float:
        """Of summing gradients and gathering weights, what does not hide behind computing: at least one layer's share.

        zero 2 sums after every micro-batch, zero 3 also gathers each layer's weights twice in each of them.
        """
        zero, micro_batches = self.layout.zero, self.micro_batches
        seconds, hidden = self._gradient(0, held), times.backward[0]
        if zero >= 2:
            seconds, hidden = seconds * micro_batches, hidden * micro_batches
        if zero == 3:
            seconds += 2 * micro_batches * self.rings[0].gather(self.predictor.each * held)
            hidden += times.forward[0] * micro_batches
        layers = max(1, self.predictor.shape.layers)
        return max(seconds - hidden * (layers - 1) / layers, seconds / layers)

    def seconds(self, counts: tuple[int, ...], settled: bool = False) -> float:
        """The whole step; `settled` lets a long one go on as it has begun, once it repeats itself (for searching)."""
        times = self.times(counts)
        ends = pipeline.settled(times, *self.plan) if settled else pipeline.simulate(times, *self.plan).ends
        after = (sum(self.after(counts, times, rank)) for rank in range(len(ends)))
        return max(end + more for end, more in zip(ends, after, strict=True)) + self.predictor.software.step_overhead

    def at_least(self, counts: tuple[int, ...]) -> float:
        """A bound from below for the step, without walking through its pipeline."""
        bound = pipeline.at_least(self.times(counts), self.layout.pipeline, self.micro_batches)
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
        known = {kind: (_least(self.costs[rank].layer), self._layer_after(rank)) for rank, kind in _first(kinds)}
        behind, weights = 0.0, [0.0] * len(kinds)
        for rank in range(len(kinds) - 1, -1, -1):
            each, after = known[kinds[rank]]
            weight = (1 - each / ways * behind) / (rounds * each + after)
            if weight > 0:
                weights[rank] = weight
                behind += weight
        first, last = _least(self.costs[0].embedding), _least(self.costs[-1].head)
        taken = rounds * (weights[0] * first + weights[-1] * last)
        there = first / ways
        for rank in range(1, len(kinds)):
            there += self.send[rank - 1] * (1 if late else 2)
            taken += weights[rank] * there
        return (layers + taken) / behind + self.predictor.software.step_overhead

    def _layer_after(self, rank: int) -> float:
        """Seconds that a layer adds after the last backward pass, at the least."""
        if self.layout.pipeline == 1:
            return 0.0
        held = self.predictor.sizes(self.layout.tensor).layer
        ring, columns = self.rings[rank], self.layout.data * self.layout.context
        shortest = min(ring.all_reduce(2 * held), ring.gather(4 * held))
        return shortest - ring.gather(0.0) * 2 + compute.optimizer(self.costs[rank].work, held / columns)

    def parts(self, counts: tuple[int, ...]) -> Parts:
        """The step taken apart, as the rank that is done last sees it."""
        times = self.times(counts)
        table = pipeline.simulate(times, *self.plan)
        ranks = range(self.layout.pipeline)
        after = [self.after(counts, times, rank) for rank in ranks]
        slowest = max(ranks, key=lambda rank: table.ends[rank] + sum(after[rank]))
        busy = table.busy[slowest]
        layers = sum(counts[slowest :: self.layout.pipeline])
        tensor = min(busy, self.micro_batches * layers * self.costs[slowest].layer.exchange)
        at_once = Times(times.forward, times.backward, times.weights, (0.0,) * len(times.send))
        bubble = pipeline.simulate(at_once, *self.plan).ends[slowest] - busy
        return Parts(
            compute=busy - tensor,
            bubble=max(0.0, bubble),
            tensor=tensor,
            pipeline=max(0.0, table.ends[slowest] - busy - bubble),
            gradient=after[slowest][0],
            optimizer=after[slowest][1],
            overhead=self.predictor.software.step_overhead,
        )


def _first(kinds: list[int]) -> list[tuple[int, int]]:
    """The first rank of each kind."""
    return [(kinds.index(kind), kind) for kind in set(kinds)]


def _least(split: Split) -> float:
    """Seconds of both passes at the least: where the host is slower it may be busy with other layers meanwhile."""
    return max(split.forward + split.backward, split.host_forward + split.host_backward)


def _kinds(seats: Sequence[Seat]) -> tuple[object, ...]:
    """What the costs of a pipeline rank depend on: types of nodes, how many ranks are on each, and their number."""
    return (*{(seat.nodes.type, seat.ranks): None for seat in seats}, len(seats))


def _pairs(one: Sequence[Seat], other: Sequence[Seat]) -> list[tuple[Seat, Seat]]:
    """Seats that send to each other."""
    return [*zip(one, other, strict=False), (one[-1], other[-1])]


def _link(one: Sequence[Seat], other: Sequence[Seat]) -> tuple[object, ...]:
    return tuple({(a.nodes.type, b.nodes.type, a.node == b.node, a.ranks): None for a, b in _pairs(one, other)})


def _again(layer: Pass, recompute: str | int) -> float:
    return layer.recompute if recompute == "full" else layer.selective if recompute == "selective" else 0.0


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
        exchange_forward + exchange_backward,
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
