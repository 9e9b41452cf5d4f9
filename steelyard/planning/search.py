"""Best-first search (branch and bound) for the layouts of a recipe on a cluster.

The search decides in four rounds: nodes, tensor and context degrees and micro-batch; then pipeline and data degrees;
then the order of nodes, expert degree and schedule; then recomputation, ZeRO stage and sequence parallelism
(`candidates`). Each round has a lower bound for all layouts below a choice, and the search expands the choice with the
lowest bound. Complete layouts are simulated. The search ends when the best simulated layouts are better than every
remaining bound. Layouts that do not fit in memory are dropped.

The partition of a layout, and the settings of the fourth round, are chosen by rules that are nearly always right. If
the meshes with a bound below the best plan are few, all their layouts are compared (`exhaustive`), so that the first
plan is that of an exhaustive search; otherwise the result is not `complete`.
"""

from __future__ import annotations

import gc
import heapq
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count, product
from operator import itemgetter
from typing import TYPE_CHECKING

from steelyard.core.console import console
from steelyard.core.errors import UserError
from steelyard.core.recipe import Recipe
from steelyard.planning import exhaustive, layout_space, memory_fit, partition, results
from steelyard.planning.candidates import Candidates, MeshCandidate
from steelyard.planning.cluster import Cluster, Placement
from steelyard.planning.layout import Layout, lacking, of_recipe
from steelyard.planning.layout_space import UNLIMITED, SearchLimits, Use
from steelyard.planning.predict import Predictor
from steelyard.planning.results import SearchResult, plan_of, weight
from steelyard.planning.software import MEGATRON, STEELYARD, Software

if TYPE_CHECKING:
    from steelyard.planning.measured_layers import Profile

QUICK = 96  # Steps with at most this many passes get their partition refined at once, others only among the best.
# The weight of a mesh that does not fit, or fits only after layers were moved, in the limit on finished meshes: the
# first is rejected quickly, the second is rarely fast.
UNFIT = 0.25
OFTEN = 256  # choices between two estimates of how many are left
# Why a result is not complete.
LARGE = "the cluster is large: the search evaluated only the most promising meshes"
MANY_PARTITIONS = "the best plan is not proven best: there are too many partitions to compare all of them"


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """A search keeps millions of small objects without cycles, which the collector would visit again and again.

    They are freed before it is on again.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@_no_garbage_collection()
def search(
    recipe: Recipe,
    cluster: Cluster,
    objective: str = "time",
    top: int = 10,
    limits: SearchLimits | None = None,
    software: Software = STEELYARD,
    profiles: Sequence[Profile] = (),
    imbalance: float = 1.0,
) -> SearchResult:
    """The `top` best plans, the best first; for `pareto`, the Pareto frontier of time and price."""
    if recipe.parallel.replicate > 1:
        raise UserError(
            "the search does not support hybrid sharding",
            where=recipe.where("parallel.replicate"),
            hint="remove parallel.replicate, or predict only this layout with --given",
        )
    _refuse_for_megatron(recipe, software)
    if not any(gpu.peak(recipe.train.precision) for gpu in cluster.gpu_by_type.values()):
        raise lacking(recipe, sorted({gpu.name for gpu in cluster.gpu_by_type.values()}))
    limits = layout_space.restricted(limits or layout_space.limits_for(cluster, objective), software)
    candidates = Candidates(recipe, cluster, limits, software, profiles, imbalance)
    if objective == "pareto" and limits.meshes < UNLIMITED:  # One search would find only fast plans within the limit.
        searches = [_Search(candidates, each, top) for each in ("time", "cost")]
    else:
        searches = [_Search(candidates, objective, top)]
    found = candidates.found
    if len(searches) > 1:
        found.incomplete = LARGE
    for each in searches:
        each.run()
    kept = sorted((entry for each in searches for entry in each.best.values()), key=itemgetter(0, 1))
    chosen = _promising(kept, cluster) if objective == "pareto" else [layout for _, _, layout in kept[:top]]
    with console.progress("refining plans", len(chosen), "plans") as bar:
        plans = []
        for layout in chosen:
            plans.append(candidates.plan(layout))
            bar.advance()
    found.plans = results.ranked(plans, objective, top)
    if not found.incomplete:
        _compare_all(candidates, searches[0].compared, objective, top)
    return found


def _compare_all(candidates: Candidates, meshes: list[MeshCandidate], objective: str, top: int) -> None:
    """Compare all layouts of the meshes that may have a better plan than those found, if these are few."""
    found, cluster = candidates.found, candidates.cluster

    def limit(mesh: MeshCandidate) -> float:
        return results.limit(found.plans, objective, cluster.price_hour(mesh.placement), cluster.watts(mesh.placement))

    left = sorted((mesh for mesh in meshes if candidates.bound(mesh) < limit(mesh)), key=candidates.bound)
    passes = [exhaustive.passes(candidates, mesh) for mesh in left]
    if sum(passes) > exhaustive.MOST:
        found.incomplete = MANY_PARTITIONS
        return
    with console.progress("comparing all layouts", sum(passes), "passes") as bar:
        for mesh, work in zip(left, passes, strict=True):
            layout = exhaustive.fastest(candidates, mesh, limit(mesh))
            if layout is not None:
                plan = plan_of(candidates.predictor(layout), layout)
                found.plans = results.ranked([*found.plans, plan], objective, top)
            bar.advance(work)


def given(
    recipe: Recipe,
    cluster: Cluster,
    software: Software = STEELYARD,
    profiles: Sequence[Profile] = (),
    imbalance: float = 1.0,
) -> SearchResult:
    """The recipe's own layout as the only plan; if it does not fit, it is also listed in `excluded`."""
    _refuse_for_megatron(recipe, software)
    layout = of_recipe(recipe, cluster, short=software is MEGATRON)
    predictor = Predictor.of_layout(recipe, cluster, layout, software, profiles, imbalance)
    found = SearchResult([plan_of(predictor, layout)], looked_at=1)
    rooms = memory_fit.rooms(predictor, layout)
    if memory_fit.reason(rooms) is not None:
        found.exclude(layout, rooms)
    return found


def _refuse_for_megatron(recipe: Recipe, software: Software) -> None:
    if software is MEGATRON and recipe.optim.offload:
        raise UserError(
            "Megatron-LM of 2021 to 2023 keeps its optimizer on the GPU",
            where=recipe.where("optim.offload"),
            hint="remove optim.offload, or use --software steelyard",
        )
    if software is MEGATRON and recipe.model.blocks.has_experts:
        raise UserError(
            f"Megatron-LM of 2021 to 2023 is not predicted for {recipe.model.family}, which has experts",
            where=recipe.where("model.family"),
            hint="use --software steelyard",
        )


class _Search:
    def __init__(self, candidates: Candidates, objective: str, top: int) -> None:
        self.candidates, self.objective, self.top = candidates, objective, top
        self.recipe, self.cluster = candidates.recipe, candidates.cluster
        self.limits, self.found = candidates.limits, candidates.found
        self.best: dict[tuple[object, ...], tuple[float, float, Layout]] = {}
        self.limit = float("inf")
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
        if not whole or len(opened) > self.limits.uses or self.finished >= self.limits.meshes:
            self.found.incomplete = LARGE
        self.queue.clear()  # Its entries refer to this search.

    def _choices_left(self, done: int) -> float:
        """About how many choices will still be expanded."""
        left = sum(bound < self.limit for bound, _, _ in self.queue)
        return min(left, done * (self.limits.meshes / self.finished - 1)) if self.finished else left

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
                least = min(map(self.candidates.bound_in_any_order, _loosest(mesh, schedules)))
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
            bound = value * min(map(self.candidates.bound, _loosest(chosen, schedules)))
            if not self._is_beaten(bound, use.counts):
                self._push(bound, partial(self._schedule, chosen, schedules))

    def _schedule(self, mesh: MeshCandidate, schedules: list[tuple[str, int]]) -> None:
        """Push each schedule of a mesh with its own bound."""
        if self.objective == "pareto":
            least = min(map(self.candidates.bound, _loosest(mesh, schedules)))
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
        left = self.candidates.sequences(mesh)
        self.found.space += len(self.candidates.zeros(mesh)) * len(self.limits.recomputes) * len(left)
        self.finished += 1
        for recompute in self.limits.recomputes:  # More recomputation is never faster.
            if not left or (not quick and self._is_beaten(self._balanced_bound(mesh, recompute), mesh.use.counts)):
                return
            fitting = self.candidates.fitting(mesh, recompute, left)
            for layout in fitting.layouts:
                self._keep(mesh, layout, quick)
            left = fitting.left
            squeezed = fitting.squeezed
            if recompute == self.limits.recomputes[0] and not fitting.layouts and not self.candidates.may_fit(mesh):
                squeezed, left = True, []
            if squeezed and not left:
                self.finished -= 1 - UNFIT

    def _keep(self, mesh: MeshCandidate, layout: Layout, quick: bool) -> None:
        if quick:
            bound = self.candidates.predictor(layout).bound(layout) * self._weight_of(layout.placement)
            if self._is_beaten(bound, mesh.use.counts):
                return
            layout = self.candidates.refined(layout, partition.QUICKLY)
        seconds = self.candidates.step(layout).seconds(layout.partition, settled=True)
        value = seconds * self._weight_of(layout.placement)
        key = (mesh.use, mesh.tensor, mesh.context, mesh.micro_batch, mesh.pipeline, mesh.data, mesh.expert)
        if key not in self.best or value < self.best[key][0]:
            self.best[key] = (value, seconds, layout)
            if self.objective == "pareto":
                self.frontier.append((seconds, seconds * (self.cluster.price_hour(layout.placement) or 0.0)))
                return
            values = sorted(entry[0] for entry in self.best.values())
            self.limit = values[self.top - 1] if len(values) >= self.top else float("inf")

    def _weight_of(self, nodes: Placement) -> float:
        return weight(self.objective, self.cluster.price_hour(nodes), self.cluster.watts(nodes))


def _loosest(mesh: MeshCandidate, schedules: list[tuple[str, int]]) -> list[MeshCandidate]:
    """The mesh with the schedules whose bounds, together, none of these is below: the deepest of both kinds."""
    deepest: dict[str, int] = {}
    for schedule, virtual in schedules:
        kind = schedule if schedule == "zero-bubble" else "1f1b"
        deepest[kind] = max(virtual, deepest.get(kind, 0))
    return [mesh._replace(schedule=kind, virtual=virtual) for kind, virtual in deepest.items()]


def _promising(kept: list[tuple[float, float, Layout]], cluster: Cluster) -> list[Layout]:
    """The Pareto frontier of time and price before partitions are refined, the fastest first."""
    chosen: list[Layout] = []
    least = float("inf")
    for _, seconds, layout in sorted(kept, key=itemgetter(1)):
        cost = seconds * (cluster.price_hour(layout.placement) or 0.0)
        if cost < least * (1 - 1e-9):
            chosen.append(layout)
            least = cost
    return chosen
