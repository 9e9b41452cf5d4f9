"""Best-first search (branch and bound) over meshes.

The search decides in four rounds: nodes, tensor and context degrees and micro-batch; then pipeline and data degrees;
then the order of nodes, expert degree and schedule; then recomputation, ZeRO stage and sequence parallelism
(`mesh_fit`). Each round has a lower bound for all layouts below a choice, and the search expands the choice with the
lowest bound. Complete layouts are simulated. The search ends when the best simulated layouts are better than every
remaining bound. Layouts that do not fit in memory are dropped.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from functools import partial
from itertools import count, product
from math import inf

from steelyard.core.console import console
from steelyard.planning import layout_space, mesh_fit, partition, results
from steelyard.planning.candidates import Candidates, MeshCandidate
from steelyard.planning.cluster import Placement
from steelyard.planning.layout import Layout
from steelyard.planning.layout_space import UNLIMITED, Use

QUICK = 96  # Steps with at most this many passes get their partition refined at once, others only among the best.
# The weight of a mesh that does not fit, or fits only after layers were moved, in the limit on finished meshes: the
# first is rejected quickly, the second is rarely fast.
UNFIT = 0.25
OFTEN = 256  # choices between two estimates of how many are left
# Why a result is not complete.
LARGE = "the cluster is large: only some sets and orders of nodes, or the most promising meshes, were compared"


class BestFirst:
    """One search for one objective. `best` has its result."""

    def __init__(self, candidates: Candidates, objective: str, top: int) -> None:
        self.candidates, self.objective, self.top = candidates, objective, top
        self.recipe, self.cluster = candidates.recipe, candidates.cluster
        self.limits, self.found = candidates.limits, candidates.found
        self.best: dict[tuple[object, ...], tuple[float, float, Layout]] = {}
        self.limit = inf
        self.frontier: list[tuple[float, float]] = []
        self.compared: list[MeshCandidate] = []
        self.finished = 0.0
        self.queue: list[tuple[float, int, Callable[[], None]]] = []
        self.ticket = count()

    def run(self) -> None:
        """Fill `best` with the best layout of each mesh, as (value, seconds, layout)."""
        uses, whole = layout_space.uses(self.cluster, self.limits)
        opened = sorted((choices for use in uses if self._can_compute(use) and (choices := self._opened(use))), key=min)
        for choices in opened[: self.limits.uses]:
            for bound, _, go_on in choices:
                self._push(bound, go_on)
        is_ordered = all(layout_space.has_all_orders(use, self.limits) for use in uses)
        with console.progress("searching", 0, "choices") as bar:
            for done in count(1):
                if not self.queue or self.finished >= self.limits.meshes:
                    break
                bound, _, go_on = heapq.heappop(self.queue)
                if bound >= self.limit:
                    break
                go_on()
                if done % OFTEN == 0:
                    bar.expect(done + self._choices_left(done))
                    bar.advance(OFTEN, f"{self.found.looked_at} layouts compared")
        if not whole or not is_ordered or len(opened) > self.limits.uses or self.finished >= self.limits.meshes:
            self.found.incomplete = LARGE
        self.queue.clear()  # Its entries refer to this search.

    def _choices_left(self, done: int) -> float:
        """About how many choices will still be expanded."""
        if self.finished and self.limits.meshes < UNLIMITED:
            return done * (self.limits.meshes / self.finished - 1)
        return sum(bound < self.limit for bound, _, _ in self.queue)

    def _can_compute(self, use: Use) -> bool:
        gpus = [self.cluster.gpu_of(self.cluster.nodes_of(type_)) for type_, _ in use.counts]
        return all(gpu.peak(self.recipe.train.precision) is not None for gpu in gpus)

    def _is_beaten(self, bound: float, nodes: Placement) -> bool:
        """Whether no layout on these nodes with this bound can improve the result."""
        if self.objective != "pareto":
            return bound >= self.limit
        cost = bound * (self.cluster.price_hour(nodes) or 0.0)
        return any(seconds <= bound and price <= cost for seconds, price in self.frontier)

    def _push(self, bound: float, opened: Callable[[], None]) -> None:
        heapq.heappush(self.queue, (bound, next(self.ticket), opened))

    def _opened(self, use: Use) -> list[tuple[float, int, Callable[[], None]]]:
        """First round: nodes, tensor, context, micro-batch. Bound: all work divided over all GPUs by their speed."""
        value = self._weight_of(use.counts)
        micro_batches = layout_space.micro_batches(self.recipe, self.limits)
        choices: list[tuple[float, int, Callable[[], None]]] = []
        for tensor in layout_space.tensors(self.recipe, self.cluster, use, self.limits):
            for context in layout_space.contexts(self.recipe, self.limits):
                if use.ranks % (tensor * context) or not self.candidates.allows(tensor, context, 1):
                    continue
                for micro_batch in micro_batches:
                    speed = 0.0
                    for type_, n in use.counts:
                        groups = n * self.cluster.nodes_of(type_).gpus / tensor / context
                        speed += groups / self.candidates.layer(type_, tensor, context, micro_batch)
                    rounds = self.recipe.train.global_batch // micro_batch
                    bound = value * rounds * self.recipe.model.layers / speed
                    go_on = partial(self._arrange, use, tensor, context, micro_batch)
                    choices.append((bound, next(self.ticket), go_on))
        return choices

    def _arrange(self, use: Use, tensor: int, context: int, micro_batch: int) -> None:
        """Second round: pipeline, data. Bound: the same work in a pipeline that has to be filled, in any order."""
        batch = self.recipe.train.global_batch // micro_batch
        divided = layout_space.batch_divisor(self.recipe) // micro_batch
        groups = use.ranks // (tensor * context)
        for pipeline, data in layout_space.meshes(groups, divided, self.recipe.model.layers):
            if not self.candidates.allows(tensor, context, pipeline):
                continue
            schedules = layout_space.schedules(self.recipe, pipeline, batch // data, self.limits)
            if schedules:
                mesh = MeshCandidate(use, tensor, context, micro_batch, use.counts, pipeline, data, "1f1b", 1)
                least = min(map(self.candidates.bound_in_any_order, loosest(mesh, schedules)))
                bound = self._weight_of(use.counts) * least
                if not self._is_beaten(bound, use.counts):
                    self._push(bound, partial(self._order, mesh, schedules))

    def _order(self, mesh: MeshCandidate, schedules: list[tuple[str, int]]) -> None:
        """Third round: order of nodes, expert. Bound: `Predictor.bound`, no recomputation."""
        use, value = mesh.use, self._weight_of(mesh.use.counts)
        placements = layout_space.orders(use, self.limits) if mesh.pipeline > 1 else [use.counts]
        degrees = layout_space.experts(self.recipe, mesh.data * mesh.context)
        for placement, expert in product(placements, degrees):
            chosen = mesh._replace(placement=placement, expert=expert)
            bound = value * min(map(self.candidates.bound, loosest(chosen, schedules)))
            if not self._is_beaten(bound, use.counts):
                self._push(bound, partial(self._schedule, chosen, schedules))

    def _schedule(self, mesh: MeshCandidate, schedules: list[tuple[str, int]]) -> None:
        """Push each schedule of a mesh with its own bound."""
        if self.objective == "pareto":
            least = min(map(self.candidates.bound, loosest(mesh, schedules)))
            if self._is_beaten(least, mesh.use.counts):
                return
        for schedule, virtual in schedules:
            chosen = mesh._replace(schedule=schedule, virtual=virtual)
            bound = self.candidates.bound(chosen) * self._weight_of(mesh.placement)
            if not self._is_beaten(bound, mesh.use.counts):
                self._push(bound, partial(self._balance, chosen, bound))

    def _balance(self, mesh: MeshCandidate, bound: float) -> None:
        """Balance the layers, which gives a tighter bound, and push the mesh again.

        The partition of a short step is refined before it is compared, so only the bound over all partitions applies.
        """
        self.compared.append(mesh)
        rounds = self.recipe.train.global_batch // (mesh.micro_batch * mesh.data)
        if mesh.pipeline * mesh.virtual * rounds * 2 <= QUICK:
            return self._finish(mesh, True)
        balanced = self._balanced_bound(mesh, self.limits.recomputes[0])
        if not self._is_beaten(balanced, mesh.use.counts):
            self._push(max(bound, balanced), partial(self._finish, mesh, False))

    def _balanced_bound(self, mesh: MeshCandidate, recompute: str) -> float:
        return self.candidates.at_least(mesh, recompute) * self._weight_of(mesh.placement)

    def _finish(self, mesh: MeshCandidate, quick: bool) -> None:
        """Fourth round: find the least recomputation that fits, with and without sequence parallelism, and simulate."""
        left, is_unfit = self.candidates.sequences(mesh), False
        self.found.space += len(self.candidates.zeros(mesh)) * len(self.limits.recomputes) * len(left)
        self.finished += 1
        for recompute in self.limits.recomputes:
            if not left or (not quick and self._is_beaten(self._balanced_bound(mesh, recompute), mesh.use.counts)):
                break
            fitting = mesh_fit.fitting(self.candidates, mesh, recompute, left)
            for layout in fitting.layouts:
                self._keep(mesh, layout, quick)
            left = fitting.left + fitting.slow
            if (
                recompute == self.limits.recomputes[0]
                and not fitting.layouts
                and not mesh_fit.may_fit(self.candidates, mesh)
            ):
                left, is_unfit = [], True
            is_unfit |= fitting.squeezed and not fitting.left
        if is_unfit:
            self.finished -= 1 - UNFIT

    def _keep(self, mesh: MeshCandidate, layout: Layout, quick: bool) -> None:
        weight = self._weight_of(layout.placement)
        if quick:
            if self._is_beaten(self.candidates.predictor(layout).bound(layout) * weight, mesh.use.counts):
                return
            layout = self.candidates.refined(layout, partition.QUICKLY, self.limit / weight if weight else inf)
        seconds = self.candidates.step(layout).seconds(layout.partition, settled=True)
        value = seconds * weight
        key = (mesh.use, mesh.tensor, mesh.context, mesh.micro_batch, mesh.pipeline, mesh.data, mesh.expert)
        if key not in self.best or value < self.best[key][0]:
            self.best[key] = (value, seconds, layout)
            if self.objective == "pareto":
                self.frontier.append((seconds, seconds * (self.cluster.price_hour(layout.placement) or 0.0)))
                return
            values = sorted(entry[0] for entry in self.best.values())
            self.limit = values[self.top - 1] if len(values) >= self.top else inf

    def _weight_of(self, nodes: Placement) -> float:
        return results.weight(self.objective, self.cluster.price_hour(nodes), self.cluster.watts(nodes))


def loosest(mesh: MeshCandidate, schedules: list[tuple[str, int]]) -> list[MeshCandidate]:
    """The mesh with the schedules whose bounds, together, none of these is below: the deepest of both kinds."""
    deepest: dict[str, int] = {}
    for schedule, virtual in schedules:
        kind = schedule if schedule == "zero-bubble" else "1f1b"
        deepest[kind] = max(virtual, deepest.get(kind, 0))
    return [mesh._replace(schedule=kind, virtual=virtual) for kind, virtual in deepest.items()]
