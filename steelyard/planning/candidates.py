"""The meshes of a search, and lower bounds for the time of their layouts.

A mesh leaves recomputation, ZeRO stage, sequence parallelism and layers per stage open (`mesh_fit`). What many meshes
share is computed once.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import gcd
from operator import gt
from typing import TYPE_CHECKING, NamedTuple

from steelyard.core.recipe import Recipe
from steelyard.planning import layout_space, partition
from steelyard.planning.cluster import Cluster, Placement
from steelyard.planning.layout import Layout
from steelyard.planning.layout_space import SearchLimits, Use, Variant
from steelyard.planning.predict import Predictor
from steelyard.planning.results import Plan, SearchResult, plan_of
from steelyard.planning.software import Software, as_run
from steelyard.planning.step import StepCost
from steelyard.planning.step_bound import fastest_order

if TYPE_CHECKING:
    from steelyard.planning.measured_layers import Profile


class MeshCandidate(NamedTuple):
    """A layout without recomputation, ZeRO stage, sequence parallelism and layers per stage."""

    use: Use
    tensor: int
    context: int
    micro_batch: int
    placement: Placement
    pipeline: int
    data: int
    schedule: str
    virtual: int
    expert: int = 1

    def layout(self, variant: Variant) -> Layout:
        """A layout of this mesh, without layers per stage."""
        return Layout(
            tensor=self.tensor,
            context=self.context,
            pipeline=self.pipeline,
            virtual=self.virtual,
            data=self.data,
            zero=variant.zero,
            sequence_parallel=variant.sequence_parallel,
            schedule=self.schedule,
            micro_batch=self.micro_batch,
            recompute=variant.recompute,
            partition=(),
            placement=self.placement,
            expert=self.expert,
        )


class Candidates:
    """The layouts of the meshes of one search. Counts and layouts that do not fit are recorded in `found`."""

    def __init__(
        self,
        recipe: Recipe,
        cluster: Cluster,
        limits: SearchLimits,
        software: Software,
        profiles: Sequence[Profile],
        imbalance: float,
    ) -> None:
        found = SearchResult([])
        self.recipe, self.cluster, self.limits, self.found = recipe, cluster, limits, found
        self.predictors = {
            splits: Predictor(recipe, cluster, as_run(software, recipe, splits), profiles, imbalance)
            for splits in (False, True)
        }
        self.layers: dict[tuple[str, int, int, int, bool], tuple[float, float]] = {}
        self.lightest: dict[tuple[object, ...], list[int]] = {}
        self.fastest: dict[tuple[str, int, int, int], float] = {}
        self.bounding_sequences: dict[tuple[object, ...], list[bool]] = {}
        self.bounds: dict[MeshCandidate, float] = {}
        self.balanced_bounds: dict[tuple[MeshCandidate, str], float] = {}
        self.allowed: dict[tuple[int, int, int], bool] = {}

    def allows(self, tensor: int, context: int, pipeline: int) -> bool:
        """Whether the recipe's validators allow this mesh."""
        key = (tensor, context, pipeline)
        if key not in self.allowed:
            self.allowed[key] = layout_space.agrees(self.recipe, self.limits, *key)
        return self.allowed[key]

    def predictor(self, layout: Layout) -> Predictor:
        """The predictor for the software as it runs the layout."""
        return self.predictors[layout.splits_backward]

    def step(self, layout: Layout) -> StepCost:
        """The cost of the layout's step as a function of its partition."""
        return self.predictor(layout).step(layout)

    def balanced(self, step: StepCost) -> tuple[int, ...]:
        """Layers per stage, without a check of memory."""
        return (partition.evenly if self.limits.even else partition.by_time)(step)

    def refined(self, layout: Layout, passes: int = partition.FULLY, wanted: float = float("inf")) -> Layout:
        """The layout with its partition improved by moving single layers, with about that many simulated passes."""
        if self.limits.even:
            return layout
        return partition.refined(self.predictor(layout), layout, self.recipe.model.layers, passes, wanted)

    def plan(self, layout: Layout) -> Plan:
        """The layout with its partition refined, and the time of its step by part."""
        layout = self.refined(layout)
        return plan_of(self.predictor(layout), layout)

    def sequences(self, mesh: MeshCandidate) -> list[bool]:
        """The settings of sequence parallelism to try, `True` first."""
        return layout_space.sequences(self.recipe, mesh.tensor, mesh.context, self.limits)

    def bounding(self, mesh: MeshCandidate) -> list[bool]:
        """The settings of sequence parallelism that need a bound: not `False` if it makes no layer faster on any node.

        In that case `False` saves only the launch of two collectives at the ends of the model, a few microseconds per
        step, and its sends are longer.
        """
        cut = (mesh.tensor, mesh.context, mesh.micro_batch)
        key = (mesh.use, *cut)
        if key not in self.bounding_sequences:
            sequences = self.sequences(mesh)
            if len(sequences) > 1:
                on, off = ([self._with_fsdp(type_, *cut, each) for type_, _ in mesh.use.counts] for each in sequences)
                sequences = sequences if any(map(gt, on, off)) else sequences[:1]
            self.bounding_sequences[key] = sequences
        return self.bounding_sequences[key]

    def layer(self, type_: str, tensor: int, context: int, micro_batch: int) -> float:
        """Seconds of both passes of a layer on one type of node, without recomputation."""
        key = (type_, tensor, context, micro_batch)
        if key not in self.fastest:
            sequences = layout_space.sequences(self.recipe, tensor, context, self.limits)
            self.fastest[key] = min(max(self._layer(*key, each)) for each in sequences)
        return self.fastest[key]

    def _with_fsdp(self, type_: str, tensor: int, context: int, micro_batch: int, sequence: bool) -> float:
        """The same with the most that the host may spend in FSDP, which hides what the GPU gains."""
        gpu, host = self._layer(type_, tensor, context, micro_batch, sequence)
        return max(gpu, host + self.predictors[False].most_host(self.cluster.nodes_of(type_)))

    def _layer(self, type_: str, tensor: int, context: int, micro_batch: int, sequence: bool) -> tuple[float, float]:
        """Seconds of the GPU and of the host, each the least over all expert degrees.

        With a higher degree a rank has fewer experts, and larger products.
        """
        key = (type_, tensor, context, micro_batch, sequence)
        if key not in self.layers:
            degrees = layout_space.all_experts(self.recipe, self.cluster.ranks)
            gpu, host = zip(*(self._layer_with(degree, *key) for degree in degrees), strict=True)
            self.layers[key] = min(gpu), min(host)
        return self.layers[key]

    def _layer_with(
        self, expert: int, type_: str, tensor: int, context: int, micro_batch: int, sequence: bool
    ) -> tuple[float, float]:
        data = expert // gcd(expert, context)
        nodes = -(-tensor * context * data // self.cluster.nodes_of(type_).gpus)
        mesh = MeshCandidate(Use((), 0), tensor, context, micro_batch, ((type_, nodes),), 1, data, "1f1b", 1, expert)
        layout = mesh.layout(Variant("none", 0, sequence))
        predictor = self.predictor(layout)
        unit, copies = predictor.costs(layout)[0].layer, predictor.least_copies(layout)
        # All-to-alls take no time here: their links depend on nodes that are not chosen yet.
        return unit.gpu - unit.expert + copies, unit.host

    def zeros(self, mesh: MeshCandidate) -> list[int]:
        """The ZeRO stages that differ on this mesh."""
        return layout_space.zeros(mesh.pipeline, mesh.data * mesh.context, self.limits)

    def bound_in_any_order(self, mesh: MeshCandidate) -> float:
        """A bound for `bound` without the order of nodes, sends, embedding and head; much faster."""
        speeds = []
        for type_, count in mesh.use.counts:
            layer = self.layer(type_, mesh.tensor, mesh.context, mesh.micro_batch)
            speeds.append((1 / layer, count * self.cluster.nodes_of(type_).gpus / mesh.tensor / mesh.context))
        runs, groups, ranks = [], 0.0, 0
        for speed, more in sorted(speeds, reverse=True):  # A rank runs at the speed of the slowest of its groups.
            groups += more
            runs.append((1 / speed, int(groups / mesh.data + 1e-9) - ranks))
            ranks += runs[-1][1]
        rounds = self.recipe.train.global_batch // (mesh.micro_batch * mesh.data)
        return fastest_order(runs, self.recipe.model.layers, rounds, mesh.virtual, mesh.schedule)

    def bound(self, mesh: MeshCandidate) -> float:
        """A lower bound over all partitions and both settings of sequence parallelism, without recomputation.

        Of the schedules, only zero-bubble has a bound of its own. Cached, because a Pareto search may run twice.
        """
        if mesh.schedule not in ("1f1b", "zero-bubble"):
            mesh = mesh._replace(schedule="1f1b")
        if mesh not in self.bounds:
            layouts = self._bounding_layouts(mesh, "none")
            self.bounds[mesh] = min(self.predictor(layout).bound(layout) for layout in layouts)
        return self.bounds[mesh]

    def at_least(self, mesh: MeshCandidate, recompute: str) -> float:
        """A lower bound for layers balanced by time, with the better setting of sequence parallelism."""
        key = (mesh, recompute)
        if key not in self.balanced_bounds:
            steps = [self.step(layout) for layout in self._bounding_layouts(mesh, recompute)]
            self.balanced_bounds[key] = min(step.at_least(self.balanced(step)) for step in steps)
        return self.balanced_bounds[key]

    def _bounding_layouts(self, mesh: MeshCandidate, recompute: str) -> list[Layout]:
        """Layouts with the ZeRO stages whose weights cost the passes the least."""
        columns, zeros = mesh.data * mesh.context, self.zeros(mesh)
        kind = (mesh.expert, mesh.pipeline > 1, mesh.schedule == "zero-bubble")
        key = (columns, mesh.micro_batch * mesh.data, mesh.placement[0][0], *kind, *zeros)
        if key not in self.lightest:
            layout = mesh.layout(Variant(recompute, 0, False))
            self.lightest[key] = self.predictor(layout).lightest(layout, zeros)
        each = product(self.lightest[key], self.bounding(mesh))
        return [mesh.layout(Variant(recompute, zero, sequence)) for zero, sequence in each]
