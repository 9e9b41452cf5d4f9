"""How long a step of a recipe takes under a layout, and where the time goes.

Each pipeline rank's stages get their seconds from `compute` and `communication`, on the slowest GPU that the stage lies
on; `step` puts them together. What many layouts share is kept, for a search asks for thousands.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from steelyard.core.recipe import Recipe
from steelyard.plan import communication, compute
from steelyard.plan.cluster import Cluster, Nodes
from steelyard.plan.communication import Ring, group
from steelyard.plan.compute import LayerDims, Pass, Work
from steelyard.plan.layout import Layout, Placement, Seat, Seats
from steelyard.plan.measured_layers import Profile
from steelyard.plan.software import STEELYARD, Software, as_run
from steelyard.plan.step import Parts, Split, StageCost, StepCost, stage_seconds
from steelyard.sizes.gpu_catalogue import Gpu
from steelyard.sizes.param_count import Parameters, parameters

T = TypeVar("T")


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
        self.profiles = {profile.gpu: profile for profile in profiles}
        self.recipe, self.cluster, self.software = recipe, linked(cluster, self.profiles), software
        self.dims = LayerDims.of(recipe)
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

    @classmethod
    def of_layout(
        cls,
        recipe: Recipe,
        cluster: Cluster,
        layout: Layout,
        software: Software = STEELYARD,
        profiles: Sequence[Profile] = (),
    ) -> Predictor:
        """With the software as it runs this layout."""
        return cls(recipe, cluster, as_run(software, recipe, layout.splits_backward), profiles)

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

    def micro_batches(self, layout: Layout) -> int:
        """Of a step, for one data-parallel rank."""
        return self.recipe.train.global_batch // (layout.micro_batch * layout.data)

    def step(self, layout: Layout) -> StepCost:
        """Everything about a layout's step that does not depend on its partition."""
        stands = self._stands(layout)
        cut = (layout.tensor, layout.context, layout.micro_batch, layout.sequence_parallel)
        columns = layout.data * layout.context
        costs = self._each(
            self._costs, (cut, layout.recompute), stands.kinds, lambda seats: self.stage_cost(layout, seats)
        )
        send = self._each(self._sends, cut, stands.links, lambda pair: self.send(layout, *pair))
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

    def stage_cost(self, layout: Layout, seats: Sequence[Seat]) -> StageCost:
        """The cost on the slowest of the GPUs, which sets the pace."""
        kinds = {seat.nodes.type: seat.nodes for seat in seats}.values()
        tensor = group(self.cluster, seats, 1, layout.tensor)
        context = group(self.cluster, seats, layout.tensor, layout.context)
        each = [self._cost_on(layout, self._gpu_of(nodes), tensor, context) for nodes in kinds]
        return max(each, key=lambda cost: cost.layer.forward + cost.layer.backward)

    def _gpu_of(self, nodes: Nodes) -> Gpu:
        """The node's GPU, with the rates that were measured on it where it was profiled."""
        gpu = self.cluster.gpu_of(nodes)
        profile = self.profiles.get(gpu.name)
        peak = gpu.peak(self.recipe.train.precision)
        if profile is None or peak is None:
            return gpu
        products, copies = profile.rates.get("product_tflops"), profile.rates.get("copy_gbps")
        return replace(
            gpu,
            sustained=products * 1e12 / peak if products else gpu.sustained,
            bandwidth_gb=copies / compute.MEMORY_SHARE if copies else gpu.bandwidth_gb,
        )

    def _cost_on(self, layout: Layout, gpu: Gpu, tensor: Ring, context: Ring) -> StageCost:
        key = (gpu.name, tensor, context, layout.micro_batch, layout.sequence_parallel, layout.recompute)
        if key not in self._costs_on:
            self._costs_on[key] = self._new_cost(layout, gpu, tensor, context)
        return self._costs_on[key]

    def _new_cost(self, layout: Layout, gpu: Gpu, tensor: Ring, context: Ring) -> StageCost:
        cut = (layout.tensor, layout.context, layout.sequence_parallel)
        work = Work.of(self.recipe, gpu, self.software, layout.micro_batch, cut)
        tokens = layout.micro_batch * self.dims.sequence // layout.context
        stream = self.each * tokens * self.dims.hidden
        # With sequence parallelism a sum is a reduce-scatter and an all-gather: the same bytes, two starts.
        sum_ = 2 * tensor.gather(stream) if layout.sequence_parallel else tensor.all_reduce(stream)
        if self.software.hides_exchange:
            sum_ /= layout.tensor
        keys = 2 * self.each * tokens * layout.context * self.dims.key / layout.tensor
        gathered = context.gather(keys)
        launch = self.software.collective_launch * (layout.tensor > 1) * (2 if layout.sequence_parallel else 1)
        layer, full = self._measured(work), layout.recompute == "full"
        sums_again = (1 if self.software.stops_early else 2) * sum_ + gathered if full else 0.0
        if self.software.regathers and layout.sequence_parallel:
            sums_again += 2 * tensor.gather(stream)
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
            _ends(compute.embedding(work, self.dims), sum_ / 2, 0.0, launch),
            _ends(compute.head(work, self.dims), 0.0, sum_, launch),
        )

    def _measured(self, work: Work) -> Pass:
        """A layer's passes as reckoned, or, where its GPU was profiled, scaled by the nearest measurement."""
        layer = compute.layer(work, self.dims)
        profile = self.profiles.get(work.gpu.name)
        if profile is None:
            return layer
        found = profile.nearest(work.tensor, work.micro_batch)
        same = replace(work, tensor=found.tensor, micro_batch=found.micro_batch, context=1, sequence_parallel=False)
        known = compute.layer(same, self.dims)
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

    def send(self, layout: Layout, one: Sequence[Seat], other: Sequence[Seat]) -> float:
        """Seconds from one stage to the next: the slowest pair, all of a node's ranks sending at once."""
        cut = layout.tensor if layout.sequence_parallel or self.software.scattered else 1
        tokens = layout.micro_batch * self.dims.sequence // layout.context
        bytes_ = self.each * tokens * self.dims.hidden / cut
        return max(communication.send(self.cluster, a, b, bytes_, a.ranks) for a, b in _pairs(one, other))

    def sizes(self, tensor: int) -> Parameters:
        """Parameters by part that one of `tensor` ranks holds."""
        if tensor not in self._parameters:
            self._parameters[tensor] = parameters(self.recipe.model, tensor, padded=True)
        return self._parameters[tensor]


def linked(cluster: Cluster, profiles: Mapping[str, Profile]) -> Cluster:
    """The cluster with the links that were measured inside its nodes, where the file does not tell them."""
    changed = [_linked(nodes, profiles.get(cluster.gpu_of(nodes).name)) for nodes in cluster.nodes]
    return cluster if changed == cluster.nodes else cluster.with_nodes(changed)


def _linked(nodes: Nodes, profile: Profile | None) -> Nodes:
    measured = profile.rates.get("link_gbps") if profile is not None else None
    if profile is None or not measured or nodes.intra_GBps is not None:
        return nodes
    latency = profile.rates.get("link_latency_us", nodes.intra_latency_us)
    reached = {"intra_GBps": measured / communication.LINK_SHARE, "intra_latency_us": latency}
    return nodes.model_copy(update=reached)


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


def _ends(cost: Pass, exchange_forward: float, exchange_backward: float, launch: float) -> Split:
    return Split(
        cost.forward + exchange_forward,
        cost.backward + exchange_backward,
        cost.host_forward + launch,
        cost.host_backward + launch,
        exchange_forward + exchange_backward,
        0.0,
    )
