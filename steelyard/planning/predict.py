"""Predict the time of a training step of one recipe under a layout on one cluster.

`stage_costs` gives the seconds of a layer, the embedding and the head on each pipeline rank, on the slowest GPU that
the rank uses. `Predictor` collects them in the `CostTable` from which `step` computes the time of the
step. Values that many layouts share are cached, because a search evaluates thousands of layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from math import inf
from typing import TYPE_CHECKING, Any, TypeVar

from steelyard.core.recipe import Recipe
from steelyard.core.recipe.optimizers import GRADIENT_BYTES
from steelyard.planning import communication, update_cost
from steelyard.planning.cluster import Cluster, Nodes
from steelyard.planning.communication import Ring, group
from steelyard.planning.compute import Work
from steelyard.planning.cost_table import CostTable, Parts, RankParams, StageCost
from steelyard.planning.evidence import OWN, layout_key, measured_cluster, work_key
from steelyard.planning.layer_dims import LayerDims
from steelyard.planning.layout import Layout, Seat, seat_pairs
from steelyard.planning.rank_kinds import RankKinds
from steelyard.planning.software import STEELYARD, Software, as_run
from steelyard.planning.stage_costs import StageCosts
from steelyard.planning.step import StepCost
from steelyard.planning.step_bound import RankBound, step_bound
from steelyard.planning.weight_copies import RankCopies, WeightShards, rank_copies
from steelyard.sizes.activations import working_bytes
from steelyard.sizes.param_count import parameters
from steelyard.sizes.rank_memory import RankMemory
from steelyard.sizes.stage_layers import StageSizes

if TYPE_CHECKING:
    from steelyard.planning.measured_layers import Profile

T = TypeVar("T")
MANY = 1 << 20  # ranks or micro-batches


class Predictor:
    """The costs of one recipe on one cluster.

    `imbalance` is the expert time of the busiest expert rank relative to an even load. The attribute `profiles` has
    those whose layers count: under other programs only their rates do.
    """

    def __init__(
        self,
        recipe: Recipe,
        cluster: Cluster,
        software: Software = STEELYARD,
        profiles: Sequence[Profile] = (),
        imbalance: float = 1.0,
    ) -> None:
        measured = {profile.gpu: profile for profile in profiles}
        self.recipe, self.cluster, self.software = recipe, measured_cluster(cluster, measured, software.name), software
        self.profiles = measured if software.name == OWN else {}
        self.dims = LayerDims.of(recipe)
        self.each = working_bytes(recipe)
        self.stage_costs = StageCosts(recipe, self.cluster, software, measured, imbalance)
        self.ranks = RankKinds(self.cluster)
        self._costs: dict[tuple[object, ...], dict[int, StageCost]] = {}
        self._sends: dict[tuple[object, ...], dict[int, float]] = {}
        self._rank_bounds: dict[tuple[object, ...], dict[int, RankBound]] = {}
        self._rings: dict[tuple[object, ...], dict[int, Ring]] = {}
        self._by_kind: dict[tuple[object, ...], dict[int, Any]] = {}
        self._params: dict[tuple[int, int, int], tuple[RankParams, ...]] = {}
        self._matrices: dict[int, int] = {}
        self._copies: dict[tuple[object, ...], dict[int, RankCopies]] = {}
        self.evidence = self.cluster.evidence
        self._is_measured = bool(self.evidence.work or self.evidence.site)
        self.overhead = max(0.0, software.step_overhead + self.evidence.overhead)
        self._stage_sizes: dict[tuple[int, int], StageSizes] = {}
        self._memories: dict[tuple[object, ...], RankMemory] = {}

    @classmethod
    def of_layout(
        cls,
        recipe: Recipe,
        cluster: Cluster,
        layout: Layout,
        software: Software = STEELYARD,
        profiles: Sequence[Profile] = (),
        imbalance: float = 1.0,
    ) -> Predictor:
        """A predictor for the software as it runs this layout."""
        return cls(recipe, cluster, as_run(software, recipe, layout.splits_backward), profiles, imbalance)

    def seats(self, layout: Layout) -> list[tuple[Seat, ...]]:
        """The nodes of each pipeline rank."""
        return self.ranks.placement(layout).seats

    def kinds(self, layout: Layout) -> list[int]:
        """A number for each pipeline rank; ranks with the same number have the same cost."""
        return self.ranks.placement(layout).kinds

    def rank_memory(self, layout: Layout) -> RankMemory:
        """The memory of Steelyard's ranks under the layout as a function of its partition."""
        key = layout_key(layout)[:-1]
        if key not in self._memories:
            cut = (layout.tensor, layout.expert)
            if cut not in self._stage_sizes:
                self._stage_sizes[cut] = StageSizes(self.recipe, *cut)
            self._memories[key] = RankMemory(layout.applied(self.recipe), layout.world, self._stage_sizes[cut])
        return self._memories[key]

    def micro_batches(self, layout: Layout) -> int:
        """Micro-batches per step on one data-parallel rank."""
        return self.recipe.train.global_batch // (layout.micro_batch * layout.data)

    def step(self, layout: Layout) -> StepCost:
        """The cost of the layout's step as a function of its partition."""
        placement = self.ranks.placement(layout)
        cut = (layout.tensor, layout.context, layout.micro_batch, layout.sequence_parallel)
        stages = self._stages(layout, placement.kinds)
        send = self.ranks.each(self._sends, cut, placement.links, lambda pair: self.send(layout, *pair))
        rings = self._groups(placement.kinds, layout.tensor, layout.data * layout.context)
        sends = (send * layout.virtual)[:-1]
        return StepCost(self.table(layout, stages, rings, sends, tuple(placement.kinds)))

    def bound(self, layout: Layout) -> float:
        """A lower bound for the step over all partitions, without a cost table if its kinds of ranks are known."""
        placement = self.ranks.placement(layout)
        cut = (layout.tensor, layout.context, layout.micro_batch, layout.sequence_parallel)
        how = (cut, layout.expert, layout.recompute, layout.zero, layout.data, layout.pipeline > 1)
        known = self._rank_bounds.setdefault(how, {})
        new = [kind for kind, _, _ in placement.runs if kind not in known]
        known |= zip(new, self._new_rank_bounds(layout, new), strict=True)
        send = self.ranks.each(self._sends, cut, placement.links, lambda pair: self.send(layout, *pair))
        runs = [(known[kind], send[rank], count) for kind, rank, count in placement.runs]
        rounds = self.micro_batches(layout)
        return step_bound(runs, self.dims.layers, rounds, layout.virtual, layout.schedule) + self.overhead

    def _new_rank_bounds(self, layout: Layout, kinds: list[int]) -> list[RankBound]:
        if not kinds:
            return []
        params = self.rank_params(layout.tensor, layout.pipeline, layout.expert)[0]
        copies = self._rank_copies(layout, kinds) or (RankCopies(),) * len(kinds)
        rings = self._groups(kinds, layout.tensor, layout.data * layout.context)
        costs = zip(self._stages(layout, kinds), copies, rings, strict=True)
        return [RankBound.of(params, *cost, layout.pipeline > 1) for cost in costs]

    def _stages(self, layout: Layout, kinds: list[int]) -> tuple[StageCost, ...]:
        """The cost of layers, embedding and head on pipeline ranks."""
        cut = (layout.tensor, layout.context, layout.micro_batch, layout.sequence_parallel)
        how = (cut, layout.expert, layout.recompute)
        return self.ranks.each(self._costs, how, kinds, lambda seats: self.stage_costs.of(layout, seats))

    def _groups(self, kinds: list[int], stride: int, size: int) -> tuple[Ring, ...]:
        """The slowest ring of `size` ranks with a stride of `stride` ranks, on pipeline ranks."""
        how = (stride, size)
        return self.ranks.each(self._rings, how, kinds, lambda seats: group(self.cluster, seats, *how))

    def table(
        self,
        layout: Layout,
        stages: tuple[StageCost, ...],
        rings: tuple[Ring, ...],
        send: tuple[float, ...],
        kinds: tuple[int, ...],
    ) -> CostTable:
        """The cost table of a layout from the costs of its pipeline ranks."""
        software, columns, expert = self.software, layout.data * layout.context, layout.expert
        placed = self.ranks.placement(layout).kinds
        same = self._groups(placed, layout.tensor * expert, columns // expert) if expert > 1 else ()
        return CostTable(
            schedule=layout.schedule,
            pipeline=layout.pipeline,
            virtual=layout.virtual,
            micro_batches=self.micro_batches(layout),
            zero=layout.zero,
            layers=self.dims.layers,
            stages=stages,
            kinds=kinds,
            rings=rings,
            params=self.rank_params(layout.tensor, layout.pipeline, expert),
            shards=(columns if layout.zero else 1,) * layout.pipeline,
            copies=self._rank_copies(layout, placed),
            expert_rings=same,
            expert_shards=columns // expert if layout.zero else 1,
            matrix_bytes=self._matrix_bytes(layout.tensor),
            stage_ranks=layout.stage_ranks,
            send=send,
            weight_bytes=self.each,
            gradient_bytes=update_cost.reduced_bytes(software, self.recipe),
            overlaps_gradients=software.overlapped,
            waits_to_send=software.waits_to_send,
            waits_to_receive=software.waits_to_receive,
            overhead=self.overhead,
        )

    def _rank_copies(self, layout: Layout, kinds: list[int]) -> tuple[RankCopies, ...]:
        """Seconds per weight of each pipeline rank besides products."""
        if not self.software.master_weights:
            return ()
        how = self._shards(layout)
        return self.ranks.each(self._copies, how, kinds, lambda seats: self._copies_on(layout, seats))

    def _shards(self, layout: Layout) -> tuple[object, ...]:
        """What these seconds depend on."""
        shards = layout.data * layout.context, layout.zero, self.micro_batches(layout), layout.pipeline > 1
        return (*shards, layout.expert, self._is_measured and work_key(layout, ""))

    def _copies_on(self, layout: Layout, seats: Sequence[Seat]) -> RankCopies:
        """Seconds per weight on the slowest GPU among the seats, with the slowest of their hosts."""
        ranks, piped = layout.data * layout.context, layout.pipeline > 1
        shards = WeightShards(ranks, layout.zero, self.micro_batches(layout), piped)
        found, gradient = [], GRADIENT_BYTES[self.recipe.optim.gradients]
        for nodes in {seat.nodes.type: seat.nodes for seat in seats}.values():
            gpu, software = self.stage_costs.gpu_of(nodes), self.software.on_host(nodes.host_slowness)
            work = replace(Work.of(self.recipe, gpu, software, 1, (1, 1, False)), expert=layout.expert)
            copies = rank_copies(work, gradient, self.dims.experts is not None, shards)
            found.append(copies.scaled(self.evidence.factors(layout, gpu.name)))
        slowest = max(found, key=lambda copies: sum(copies.layer))
        return slowest._replace(host=max((copies.host for copies in found), key=sum))

    def most_host(self, nodes: Nodes) -> float:
        """The most that the host spends in FSDP for both passes of a layer."""
        return sum(WeightShards(MANY, 3, 1, False).host(self.software.on_host(nodes.host_slowness)))

    def least_copies(self, layout: Layout) -> float:
        """The least seconds that the weights of a layer cost both passes of a micro-batch, on any number of data ranks.

        They are linear in one over the number of ranks, and of micro-batches from two on.
        """
        if not self.software.master_weights:
            return 0.0
        gpu = self.stage_costs.gpu_of(self.seats(layout)[0][0].nodes)
        work = Work.of(self.recipe, gpu, self.software, 1, (1, 1, False))
        gradient, has_experts = GRADIENT_BYTES[self.recipe.optim.gradients], self.dims.experts is not None
        params = self.rank_params(layout.tensor, 1, layout.expert)[0]
        factors = self.evidence.factors(layout, gpu.name)
        return min(
            rank_copies(work, gradient, has_experts, WeightShards(*shards)).scaled(factors).of_layer(params.layer, 0)
            for shards in product((1, 2, MANY), range(4), (1, 2, MANY), (False, True))
        )

    def lightest(self, layout: Layout, zeros: Sequence[int]) -> list[int]:
        """The ZeRO stages with the shortest passes: each other one costs both the GPU and the host at least as much."""
        if not self.software.master_weights:
            return [zeros[0]]
        seats, found = self.seats(layout)[0], []
        each = ((zero, self._copies_on(replace(layout, zero=zero), seats)) for zero in zeros)
        least = inf
        for _, host, zero in sorted((sum(copies.layer), sum(copies.host), zero) for zero, copies in each):
            if host < least:
                found.append(zero)
                least = host
        return found

    def _matrix_bytes(self, tensor: int) -> int:
        if tensor not in self._matrices:
            self._matrices[tensor] = update_cost.exchanged_bytes(self.recipe, tensor)
        return self._matrices[tensor]

    def each_kind(self, what: str, layout: Layout, made: Callable[[Sequence[Seat]], T]) -> tuple[T, ...]:
        """A value for each pipeline rank, made once from the seats of each kind of rank and kept under `what`."""
        return self.ranks.each(self._by_kind, (what,), self.ranks.placement(layout).kinds, made)

    def seconds(self, layout: Layout) -> float:
        """The time of the step."""
        return self.step(layout).seconds(layout.partition)

    def parts(self, layout: Layout) -> Parts:
        """The time of the step by part."""
        return self.step(layout).parts(layout.partition)

    def costs(self, layout: Layout) -> tuple[StageCost, ...]:
        """The cost of layers, embedding and head on each pipeline rank."""
        return self._stages(layout, self.ranks.placement(layout).kinds)

    def send(self, layout: Layout, one: Sequence[Seat], other: Sequence[Seat]) -> float:
        """Seconds to send from one stage to the next: the slowest pair, with all ranks of a node sending at once."""
        cut = layout.tensor if layout.sequence_parallel or self.software.scattered else 1
        tokens = layout.micro_batch * self.dims.sequence // layout.context
        bytes_ = self.each * tokens * self.dims.hidden / cut
        return max(communication.send(self.cluster, a, b, bytes_, a.ranks) for a, b in seat_pairs(one, other))

    def rank_params(self, tensor: int, pipeline: int, expert: int = 1) -> tuple[RankParams, ...]:
        """Parameters on each pipeline rank. A tied head on another rank than the embedding is a second copy of it."""
        key = (tensor, pipeline, expert)
        if key not in self._params:
            model = self.recipe.model
            sizes = parameters(model, tensor, True, expert)
            copied = model.padded_vocab * model.hidden // tensor if model.tied and pipeline > 1 else 0
            ends = [0] * pipeline
            ends[0] += sizes.embedding
            ends[-1] += sizes.final_norm + sizes.head + copied
            experts = sizes.experts // sizes.layers if expert > 1 else 0
            layer = sizes.all_layers // sizes.layers - experts
            self._params[key] = tuple(RankParams(layer, end, experts) for end in ends)
        return self._params[key]
