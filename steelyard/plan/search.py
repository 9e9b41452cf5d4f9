"""The best layouts of a recipe on a cluster, found best first.

Choices are made in three rounds: which nodes, tensor and context degrees and micro-batch; then the order of nodes,
pipeline, data and schedule; then recomputation, sharding and sequence parallelism (`whole`). Each round knows a bound
that no plan below it can beat, and always the most promising choice is taken further. A plan that is whole is
simulated; once the best simulated plans are better than every bound that is left, the rest of the space need not be
looked at: the answer is that of looking at all of it. Plans that do not fit in memory drop out on the way, so every
plan in the answer fits.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import count

from steelyard.core.errors import UserError
from steelyard.core.recipe import Recipe
from steelyard.plan import layout_space, memory_fit
from steelyard.plan.candidates import MeshCandidate, Wholes
from steelyard.plan.cluster import Cluster
from steelyard.plan.layout import Layout, Placement, lacking, of_recipe
from steelyard.plan.layout_space import SearchLimits, Use
from steelyard.plan.measured_layers import Profile
from steelyard.plan.predict import Predictor
from steelyard.plan.pricing import price_hour, watts, weight
from steelyard.plan.results import Found, Plan
from steelyard.plan.software import MEGATRON, STEELYARD, Software

QUICK = 96  # Actions of a step up to which its partition is refined at once, not only when it is among the best.

# What a mesh that does not fit, or only with layers moved off full stages, counts of those that may be taken to the
# end: the one is soon known, the other seldom fast.
UNFIT = 0.25


def search(
    recipe: Recipe,
    cluster: Cluster,
    objective: str = "time",
    top: int = 10,
    limits: SearchLimits | None = None,
    software: Software = STEELYARD,
    profiles: Sequence[Profile] = (),
) -> Found:
    """The `top` best plans, the best first; for `pareto` all that no other beats in both time and price."""
    if recipe.parallel.replicate > 1:
        raise UserError(
            "layouts with hybrid sharding are not searched",
            where=recipe.where("parallel.replicate"),
            hint="leave parallel.replicate out, or predict this layout alone with --given",
        )
    _refuse_offload(recipe, software)
    if not any(gpu.peak(recipe.train.precision) for gpu in cluster.gpu_by_type.values()):
        raise lacking(recipe, sorted({gpu.name for gpu in cluster.gpu_by_type.values()}))
    limits = layout_space.restricted(limits or layout_space.limits_for(cluster, objective), software)
    wholes = Wholes(recipe, cluster, limits, software, profiles, Found([]))
    found = _Search(wholes, objective, top).run()
    if objective == "pareto" and not found.complete:  # It was cut off among fast plans: cheap ones are found by price.
        fast = found.plans
        found = _Search(wholes, "cost", top).run()
        found.plans, found.complete = _frontier(fast + found.plans), False
    return found


def given(recipe: Recipe, cluster: Cluster, software: Software = STEELYARD, profiles: Sequence[Profile] = ()) -> Found:
    """The recipe's own layout as the only plan; where it does not fit, it is among the excluded as well."""
    _refuse_offload(recipe, software)
    layout = of_recipe(recipe, cluster, short=software is MEGATRON)
    predictor = Predictor.of_layout(recipe, cluster, layout, software, profiles)
    why = memory_fit.reason(memory_fit.rooms(predictor, layout))
    price = price_hour(cluster, layout.placement)
    plan = Plan(layout, predictor.parts(layout), price, watts(cluster, layout.placement))
    return Found([plan], [] if why is None else [(layout, why)], 1)


def _refuse_offload(recipe: Recipe, software: Software) -> None:
    if software is MEGATRON and recipe.optim.offload:
        raise UserError(
            "Megatron-LM of 2021 to 2023 keeps its optimizer on the GPU",
            where=recipe.where("optim.offload"),
            hint="leave optim.offload out, or plan for steelyard",
        )


class _Search:
    def __init__(self, wholes: Wholes, objective: str, top: int) -> None:
        self.wholes, self.objective, self.top = wholes, objective, top
        self.recipe, self.cluster, self.limits, self.found = wholes.recipe, wholes.cluster, wholes.limits, wholes.found
        self.best: dict[tuple[object, ...], tuple[float, float, Layout]] = {}
        self.limit = float("inf")
        self.frontier: list[tuple[float, float]] = []
        self.finished = 0.0
        self.queue: list[tuple[float, int, Callable[[], None]]] = []
        self.ticket = count()

    def run(self) -> Found:
        uses, whole = layout_space.uses(self.cluster, self.limits)
        opened = sorted((choices for use in uses if self._can_compute(use) and (choices := self._opened(use))), key=min)
        for choices in opened[: self.limits.uses]:
            for bound, _, go_on in choices:
                self._push(bound, go_on)
        self.found.complete = whole and len(opened) <= self.limits.uses
        while self.queue and self.finished < self.limits.meshes:
            bound, _, go_on = heapq.heappop(self.queue)
            if bound >= self.limit:
                break
            go_on()
        self.found.complete &= self.finished < self.limits.meshes
        kept = sorted(self.best.values(), key=lambda entry: entry[:2])
        if self.objective == "pareto":
            self.found.plans = _frontier([self.wholes.plan(layout) for layout in self._promising(kept)])
        else:
            plans = [self.wholes.plan(layout) for _, _, layout in kept[: self.top]]
            self.found.plans = sorted(plans, key=lambda plan: plan.value(self.objective))
        return self.found

    def _promising(self, kept: list[tuple[float, float, Layout]]) -> list[Layout]:
        """What no other beats in both time and price, before partitions are refined: the fastest first."""
        chosen: list[Layout] = []
        least = float("inf")
        for _, seconds, layout in sorted(kept, key=lambda entry: entry[1]):
            cost = seconds * (price_hour(self.cluster, layout.placement) or 0.0)
            if cost < least * (1 - 1e-9):
                chosen.append(layout)
                least = cost
        return chosen

    def _can_compute(self, use: Use) -> bool:
        gpus = [self.cluster.gpu_of(self.cluster.nodes_of(type_)) for type_, _ in use.counts]
        return all(gpu.peak(self.recipe.train.precision) is not None for gpu in gpus)

    def _is_beaten(self, bound: float, nodes: Placement) -> bool:
        """Whether nothing on these nodes with such a bound can enter the answer any more."""
        if self.objective != "pareto":
            return bound >= self.limit
        cost = bound * (price_hour(self.cluster, nodes) or 0.0)
        return any(seconds <= bound and price <= cost for seconds, price in self.frontier)

    def _push(self, bound: float, opened: Callable[[], None]) -> None:
        heapq.heappush(self.queue, (bound, next(self.ticket), opened))

    def _opened(self, use: Use) -> list[tuple[float, int, Callable[[], None]]]:
        """First round: nodes, tensor, context, micro-batch. Bound: all work, spread over all GPUs by their speed."""
        worth = self._weight_of(use.counts)
        choices: list[tuple[float, int, Callable[[], None]]] = []
        for tensor in layout_space.tensors(self.recipe, self.cluster, use, self.limits):
            for context in layout_space.contexts(self.recipe, self.limits):
                if use.ranks % (tensor * context) or not layout_space.agrees(self.recipe, tensor, context, 1):
                    continue
                for micro_batch in layout_space.micro_batches(self.recipe, self.limits):
                    each = {type_: self.wholes.layer(type_, tensor, context, micro_batch) for type_, _ in use.counts}
                    groups = {
                        type_: n * self.cluster.nodes_of(type_).gpus / tensor / context for type_, n in use.counts
                    }
                    speed = sum(groups[type_] / each[type_] for type_ in each)
                    rounds = self.recipe.train.global_batch // micro_batch
                    bound = worth * rounds * self.recipe.model.layers / speed
                    go_on = partial(self._arrange, use, tensor, context, micro_batch)
                    choices.append((bound, next(self.ticket), go_on))
        return choices

    def _arrange(self, use: Use, tensor: int, context: int, micro_batch: int) -> None:
        """Second round: order of nodes, pipeline, data, schedule. Bound: that of all partitions, nothing recomputed."""
        layers = self.recipe.model.layers
        worth = self._weight_of(use.counts)
        batch = self.recipe.train.global_batch // micro_batch
        dealt = layout_space.dealt_batch(self.recipe) // micro_batch
        for pipeline, data in layout_space.meshes(use.ranks // (tensor * context), dealt, layers):
            if not layout_space.agrees(self.recipe, tensor, context, pipeline):
                continue
            schedules = layout_space.schedules(self.recipe, pipeline, batch // data, self.limits)
            deepest = max((virtual for _, virtual in schedules), default=0)
            for placement in (layout_space.orders(use) if pipeline > 1 else [use.counts]) if deepest else ():
                mesh = MeshCandidate(use, tensor, context, micro_batch, placement, pipeline, data, "1f1b", deepest)
                bound = worth * self.wholes.bound(mesh)
                if not self._is_beaten(bound, use.counts):
                    self._push(bound, partial(self._schedule, mesh, schedules))

    def _schedule(self, mesh: MeshCandidate, schedules: list[tuple[str, int]]) -> None:
        """The schedules of a mesh, each with its own bound."""
        if self.objective == "pareto" and self._is_beaten(self.wholes.bound(mesh), mesh.use.counts):
            return
        for schedule, virtual in schedules:
            chosen = replace(mesh, schedule=schedule, virtual=virtual)
            bound = self.wholes.bound(chosen) * self._weight_of(mesh.placement)
            if not self._is_beaten(bound, mesh.use.counts):
                self._push(bound, partial(self._deal, chosen, bound))

    def _deal(self, mesh: MeshCandidate, bound: float) -> None:
        """Layers dealt out, which tells more of a step than any bound: those of a long one wait for their turn again.

        A short step's partition is refined before it is compared, so it has no other bound than that of all partitions.
        """
        rounds = self.recipe.train.global_batch // (mesh.micro_batch * mesh.data)
        if mesh.pipeline * mesh.virtual * rounds * 2 <= QUICK:
            return self._finish(mesh, True)
        dealt = self.wholes.at_least(mesh, self.limits.recomputes[0]) * self._weight_of(mesh.placement)
        if not self._is_beaten(dealt, mesh.use.counts):
            self._push(max(bound, dealt), partial(self._finish, mesh, False))

    def _finish(self, mesh: MeshCandidate, quick: bool) -> None:
        """Third round: the least recomputation that fits, with and without sequence parallelism; then simulate."""
        left = self.wholes.sequences(mesh)
        self.found.space += len(self.wholes.zeros(mesh)) * len(self.limits.recomputes) * len(left)
        self.finished += 1
        for recompute in self.limits.recomputes:  # Computing more again can only be slower.
            bound = self.wholes.at_least(mesh, recompute) * self._weight_of(mesh.placement)
            if not left or (not quick and self._is_beaten(bound, mesh.use.counts)):
                return
            fitting = self.wholes.fitting(mesh, recompute, left)
            for layout in fitting.layouts:
                self._keep(mesh, layout, quick)
            left = fitting.left
            squeezed = fitting.squeezed
            if recompute == self.limits.recomputes[0] and not fitting.layouts and not self.wholes.may_fit(mesh):
                squeezed, left = True, []
            if squeezed and not left:
                self.finished -= 1 - UNFIT

    def _keep(self, mesh: MeshCandidate, layout: Layout, quick: bool) -> None:
        if quick:
            layout = self.wholes.refined(layout)
        seconds = self.wholes.step(layout).seconds(layout.partition, settled=True)
        value = seconds * self._weight_of(layout.placement)
        key = (mesh.use, mesh.tensor, mesh.context, mesh.micro_batch, mesh.pipeline, mesh.data)
        if key not in self.best or value < self.best[key][0]:
            self.best[key] = (value, seconds, layout)
            if self.objective == "pareto":
                self.frontier.append((seconds, seconds * (price_hour(self.cluster, layout.placement) or 0.0)))
                return
            values = sorted(entry[0] for entry in self.best.values())
            self.limit = values[self.top - 1] if len(values) >= self.top else float("inf")

    def _weight_of(self, nodes: Placement) -> float:
        return weight(self.objective, price_hour(self.cluster, nodes), watts(self.cluster, nodes))


def _frontier(plans: list[Plan]) -> list[Plan]:
    """What no other beats in both time and price, the fastest first."""
    chosen: list[Plan] = []
    least = float("inf")
    for plan in sorted(plans, key=lambda plan: (plan.seconds, plan.value("cost"))):
        if plan.value("cost") < least * (1 - 1e-9):
            chosen.append(plan)
            least = plan.value("cost")
    return chosen
