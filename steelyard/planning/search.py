"""Search the layouts of a recipe on a cluster for the best plans, or predict one layout.

`best_first` compares meshes. It chooses the partition of a layout, and the settings that a mesh leaves open, by rules
that are nearly always right. If the meshes with a bound below the best plan are few, all their layouts are then
compared (`exhaustive`), so that the first plan is that of an exhaustive search; otherwise the result is not `complete`.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import itemgetter
from typing import TYPE_CHECKING

from steelyard.core.console import console
from steelyard.core.errors import UserError
from steelyard.core.recipe import Recipe
from steelyard.planning import exhaustive, layout_space, memory_fit, nearest_miss, program_limits, results
from steelyard.planning.best_first import LARGE, BestFirst
from steelyard.planning.candidates import Candidates, MeshCandidate
from steelyard.planning.cluster import Cluster
from steelyard.planning.layout import Layout, lacking, of_recipe
from steelyard.planning.layout_space import UNLIMITED, SearchLimits
from steelyard.planning.predict import Predictor
from steelyard.planning.results import SearchResult, plan_of
from steelyard.planning.software import STEELYARD, Software

if TYPE_CHECKING:
    from steelyard.planning.measured_layers import Profile

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
    program_limits.refuse_recipe(recipe, software)
    if not any(gpu.peak(recipe.train.precision) for gpu in cluster.gpu_by_type.values()):
        raise lacking(recipe, sorted({gpu.name for gpu in cluster.gpu_by_type.values()}))
    limits = program_limits.restricted(limits or layout_space.limits_for(cluster, objective), software)
    candidates = Candidates(recipe, cluster, limits, software, profiles, imbalance)
    if objective == "pareto" and limits.meshes < UNLIMITED:  # One search would find only fast plans within the limit.
        searches = [BestFirst(candidates, each, top) for each in ("time", "cost")]
    else:
        searches = [BestFirst(candidates, objective, top)]
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
    if not found.plans:
        nearest_miss.settle(candidates)
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
    program_limits.refuse_recipe(recipe, software)
    layout = of_recipe(recipe, cluster, short=program_limits.is_short(software))
    program_limits.refuse_layout(recipe, layout, software)
    predictor = Predictor.of_layout(recipe, cluster, layout, software, profiles, imbalance)
    found = SearchResult([plan_of(predictor, layout)], looked_at=1)
    rooms = memory_fit.rooms(predictor, layout)
    if memory_fit.reason(rooms) is not None:
        found.exclude(layout, rooms)
    return found


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
