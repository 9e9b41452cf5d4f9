"""Whole layouts of a mesh: which recomputation, sharding and sequence parallelism fit, and which of them are worth a
simulation.

Sequence parallelism is chosen for every layout anew. It cuts what the stream moves and sends, but starts two
collectives where there was one, so that small layers, which wait for the host, are faster without it; and it mostly
saves memory, but not under selective recomputation on two tensor ranks, which keeps what was gathered. Only where one
choice is no slower in any stage, or takes no less memory, is the other left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import gt

from steelyard.core.recipe import Recipe
from steelyard.plan import layer_assignment, layout_space, memory_fit
from steelyard.plan.cluster import Cluster
from steelyard.plan.layout import Layout, Placement
from steelyard.plan.layout_space import SearchLimits, Use, Variant
from steelyard.plan.measured_layers import Profile
from steelyard.plan.predict import Predictor
from steelyard.plan.pricing import price_hour, watts
from steelyard.plan.results import Found, Plan
from steelyard.plan.software import Software, as_run
from steelyard.plan.step import StepCost, least


@dataclass(frozen=True)
class MeshCandidate:
    """Everything but recomputation, sharding, sequence parallelism and layers per stage."""

    use: Use
    tensor: int
    context: int
    micro_batch: int
    placement: Placement
    pipeline: int
    data: int
    schedule: str
    virtual: int

    def layout(self, variant: Variant) -> Layout:
        """A layout of it, but for the layers per stage."""
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
        )


@dataclass
class Fitting:
    """What was found to fit of a mesh with some recomputation."""

    layouts: list[Layout]
    left: list[bool]
    """Choices of sequence parallelism that do not fit yet, and might with more recomputation."""
    squeezed: bool
    """Whether one fits only with layers moved off stages that were too full."""


class Wholes:
    """The whole layouts of a search's meshes; what was looked at and what does not fit is told to `found`."""

    def __init__(
        self,
        recipe: Recipe,
        cluster: Cluster,
        limits: SearchLimits,
        software: Software,
        profiles: Sequence[Profile],
        found: Found,
    ) -> None:
        self.recipe, self.cluster, self.limits, self.found = recipe, cluster, limits, found
        self.predictors = {
            splits: Predictor(recipe, cluster, as_run(software, recipe, splits), profiles) for splits in (False, True)
        }
        self.layers: dict[tuple[str, int, int, int, bool], float] = {}
        self.bounds: dict[MeshCandidate, float] = {}

    def predictor(self, layout: Layout) -> Predictor:
        """That of the software as it runs the layout."""
        return self.predictors[layout.splits_backward]

    def step(self, layout: Layout) -> StepCost:
        """The cost of its step."""
        return self.predictor(layout).step(layout)

    def dealt(self, layout: Layout) -> tuple[int, ...]:
        """Layers per stage, memory left aside."""
        deal = layer_assignment.evenly if self.limits.even else layer_assignment.by_time
        return deal(self.predictor(layout), layout, self.recipe.model.layers)

    def refined(self, layout: Layout) -> Layout:
        """With its partition as short as single moves of layers make it."""
        if self.limits.even:
            return layout
        return layer_assignment.refined(self.predictor(layout), layout, self.recipe.model.layers)

    def plan(self, layout: Layout) -> Plan:
        """The layout with its partition refined and its step taken apart."""
        layout = self.refined(layout)
        price = price_hour(self.cluster, layout.placement)
        return Plan(layout, self.predictor(layout).parts(layout), price, watts(self.cluster, layout.placement))

    def sequences(self, mesh: MeshCandidate) -> list[bool]:
        """Whether sequence parallelism may be on and off, on first."""
        return layout_space.sequences(self.recipe, mesh.tensor, mesh.context, self.limits)

    def bounding(self, mesh: MeshCandidate) -> list[bool]:
        """The same, less those that need no bound of their own: off where no node's layers are faster with it off.

        Then nothing is but the starts of two collectives at the ends of the model, a few microseconds of a step, and
        sends are longer.
        """
        sequences = self.sequences(mesh)
        if len(sequences) == 1:
            return sequences
        cut = (mesh.tensor, mesh.context, mesh.micro_batch)
        on, off = ([self._layer(type_, *cut, each) for type_, _ in mesh.use.counts] for each in sequences)
        return sequences if any(map(gt, on, off)) else sequences[:1]

    def layer(self, type_: str, tensor: int, context: int, micro_batch: int) -> float:
        """Seconds of a layer on one type of node, both passes, nothing computed again."""
        sequences = layout_space.sequences(self.recipe, tensor, context, self.limits)
        return min(self._layer(type_, tensor, context, micro_batch, each) for each in sequences)

    def _layer(self, type_: str, tensor: int, context: int, micro_batch: int, sequence: bool) -> float:
        key = (type_, tensor, context, micro_batch, sequence)
        if key not in self.layers:
            nodes = -(-tensor * context // self.cluster.nodes_of(type_).gpus)
            mesh = MeshCandidate(Use((), 0), tensor, context, micro_batch, ((type_, nodes),), 1, 1, "1f1b", 1)
            self.layers[key] = least(self.step(mesh.layout(Variant("none", 0, sequence))).costs[0].layer)
        return self.layers[key]

    def zeros(self, mesh: MeshCandidate) -> list[int]:
        """Degrees of sharding that differ on this mesh."""
        return layout_space.zeros(mesh.pipeline, mesh.data * mesh.context, self.limits)

    def bound(self, mesh: MeshCandidate) -> float:
        """A bound for all partitions, nothing recomputed, with sequence parallelism or without. Kept: a frontier's two
        searches, by time and by price, ask for the same ones.
        """
        if mesh not in self.bounds:
            layouts = [mesh.layout(Variant("none", 0, sequence)) for sequence in self.bounding(mesh)]
            self.bounds[mesh] = min(self.step(layout).bound(self.recipe.model.layers) for layout in layouts)
        return self.bounds[mesh]

    def at_least(self, mesh: MeshCandidate, recompute: str) -> float:
        """Seconds that layers dealt out by time take at the least, with the better choice of sequence parallelism."""
        layouts = [mesh.layout(Variant(recompute, 0, sequence)) for sequence in self.bounding(mesh)]
        return min(self.step(layout).at_least(self.dealt(layout)) for layout in layouts)

    def may_fit(self, mesh: MeshCandidate) -> bool:
        """Whether the mesh fits at its most frugal; if it does not, nothing of it does."""
        frugal = self.zeros(mesh)[-1:]
        return bool(self.fitting(mesh, self.limits.recomputes[-1], self.sequences(mesh), frugal).layouts)

    def fitting(
        self, mesh: MeshCandidate, recompute: str, sequences: Sequence[bool], zeros: Sequence[int] | None = None
    ) -> Fitting:
        """Of each choice of sequence parallelism the layout that fits and has the fastest sharding that does."""
        found = Fitting([], [], False)
        zeros = self.zeros(mesh) if zeros is None else zeros
        tight: tuple[Layout, int] | None = None
        for sequence in sequences:
            layout = mesh.layout(Variant(recompute, zeros[0], sequence))
            layout = layout.with_partition(self.dealt(layout))
            if found.layouts and self._is_no_faster(layout, found.layouts[0]):
                continue
            if tight is not None and self._is_no_smaller(layout, *tight):
                found.left.append(sequence)
                continue
            fits, tight = self._fitting([replace(layout, zero=zero) for zero in zeros])
            if fits is None:
                found.left.append(sequence)
            else:
                found.layouts.append(fits)
                found.squeezed |= fits.partition != layout.partition
        return found

    def _is_no_faster(self, layout: Layout, other: Layout) -> bool:
        """Whether no stage, and no send, is faster than another layout's that differs in sequence parallelism alone."""
        one, two = self.step(layout), self.step(other)
        for counts in {layout.partition, other.partition}:
            ours, theirs = one.times(counts), two.times(counts)
            pairs = zip(ours.everything(), theirs.everything(), strict=True)
            if any(mine < its for mine, its in pairs):
                return False
        return True

    def _is_no_smaller(self, layout: Layout, other: Layout, rank: int) -> bool:
        """Whether it takes no less memory than another layout where that one did not fit."""
        ours, theirs = replace(layout, zero=other.zero, partition=other.partition), other
        [mine], [its] = (memory_fit.rooms(self.predictor(each), each, [rank]) for each in (ours, theirs))
        return mine.memory.total >= its.memory.total

    def _fitting(self, layouts: list[Layout]) -> tuple[Layout | None, tuple[Layout, int] | None]:
        """The first of these that fits, those with the least to do after the last backward pass first.

        Or else one that does not, and a rank where it does not.
        """
        timed = []
        for number, layout in enumerate(layouts):
            step = self.step(layout)
            times = step.times(layout.partition)
            after = max(sum(step.after(layout.partition, times, rank)) for rank in range(layout.pipeline))
            timed.append((after, number, layout))
        tight: tuple[Layout, int] | None = None
        for _, _, layout in sorted(timed):
            self.found.looked_at += 1
            predictor = self.predictor(layout)
            rooms = memory_fit.rooms(predictor, layout, memory_fit.telling(predictor, layout))
            if all(room.fits for room in rooms):
                return layout, None
            if not self.limits.even and any(room.fits for room in rooms):
                again = layer_assignment.within(predictor, layout, self.recipe.model.layers)
                if again is not None:
                    return again, None
            tight = layout, next(room.rank for room in rooms if not room.fits)
            self.found.excluded.append((layout, memory_fit.reason(rooms) or ""))
        return None, tight
