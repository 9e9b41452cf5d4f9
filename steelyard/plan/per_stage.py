"""Plans whose stages have widths of their own, one for each type of node: a search beside the main one.

A type's nodes are cut into stages of tensor x data ranks; types stand in blocks along the pipeline, in any order. All
combinations are put in the order of a simple bound (all work, spread by speed), the most promising are dealt layers,
and the best of those are refined, checked against memory and simulated. The engine runs one mesh for all stages, so
these plans are shown apart and cannot be written: they tell what other widths would be worth.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations, islice, permutations, product

from steelyard.core.recipe import Recipe
from steelyard.plan import layout_space, partition
from steelyard.plan.cluster import Cluster
from steelyard.plan.layout import Layout, Placement
from steelyard.plan.layout_space import SearchLimits
from steelyard.plan.measured_layers import Profile
from steelyard.plan.predict import Predictor
from steelyard.plan.pricing import price_hour, watts, weight
from steelyard.plan.results import Planned
from steelyard.plan.software import STEELYARD, Software, as_run
from steelyard.plan.step import least
from steelyard.plan.tensor_widths import StagedLayout, StagedStep, Width

DEALT = 400  # Combinations that are dealt layers, the most promising ones,
SIMULATED = 40  # and those of them that are refined and simulated.
TRIES = 24  # Simulations to refine one of them.


StagedPlan = Planned[StagedLayout]


@dataclass(frozen=True)
class _Block:
    """The stages of one type of node."""

    type: str
    nodes: int
    width: Width
    stages: int
    each: float
    """Seconds of a layer, both passes."""


def search(
    recipe: Recipe,
    cluster: Cluster,
    objective: str = "time",
    top: int = 3,
    software: Software = STEELYARD,
    profiles: Sequence[Profile] = (),
) -> list[StagedPlan]:
    """The best plans whose stages differ in width, the best first; empty where there is only one type of node."""
    predictor = Predictor(recipe, cluster, as_run(software, recipe, False), profiles)
    limits = layout_space.limits_for(cluster)
    chosen = sorted(_combinations(predictor, limits, objective), key=lambda entry: entry[0])
    dealt: list[tuple[float, int, StagedLayout, tuple[int, ...]]] = []
    for _, blocks in islice(chosen, DEALT):
        for staged in _layouts(recipe, blocks):
            step = StagedStep(predictor, staged)
            counts = tuple(partition.dealt(*step.per_layer(), recipe.model.layers))
            value = step.at_least(counts) * _weight_of(cluster, staged, objective)
            dealt.append((value, len(dealt), staged, counts))
    plans: list[StagedPlan] = []
    for value, _, staged, counts in islice(sorted(dealt, key=lambda entry: entry[:2]), SIMULATED):
        if len(plans) >= top and value >= sorted(plan.value(objective) for plan in plans)[top - 1]:
            break
        plan = _finished(predictor, staged, counts, limits)
        plans += [plan] if plan is not None else []
    return sorted(plans, key=lambda plan: plan.value(objective))[:top]


def _combinations(
    predictor: Predictor, limits: SearchLimits, objective: str
) -> Iterator[tuple[float, tuple[_Block, ...]]]:
    """Widths for the nodes of two types or more, with a bound for the step."""
    recipe, cluster = predictor.recipe, predictor.cluster
    batch, layers = layout_space.dealt_batch(recipe), recipe.model.layers
    able = [nodes.type for nodes in cluster.nodes if cluster.gpu_of(nodes).peak(recipe.train.precision) is not None]
    for size in range(2, len(able) + 1):
        for types in combinations(able, size):
            placement = tuple((type_, cluster.nodes_of(type_).count) for type_ in types)
            worth = weight(objective, price_hour(cluster, placement), watts(cluster, placement))
            for chunk in layout_space.divisors(batch):
                options = [_blocks(predictor, type_, chunk, limits) for type_ in types]
                for blocks in product(*options):
                    if len({block.width for block in blocks}) == 1:
                        continue  # The main search's.
                    stages = sum(block.stages for block in blocks)
                    if stages > layers + 2:
                        continue
                    speed = sum(block.stages / block.each for block in blocks)
                    yield worth * (recipe.train.global_batch // chunk) * layers / speed, blocks


def _blocks(predictor: Predictor, type_: str, chunk: int, limits: SearchLimits) -> list[_Block]:
    """How a type's nodes can be cut into stages that take `chunk` samples at a time."""
    recipe, cluster = predictor.recipe, predictor.cluster
    nodes = cluster.nodes_of(type_)
    ranks = nodes.count * nodes.gpus
    use = layout_space.Use(((type_, nodes.count),), ranks)
    found = []
    for tensor in layout_space.tensors(recipe, cluster, use, limits):
        if not layout_space.agrees(recipe, tensor, 1, 2):
            continue
        for data in layout_space.divisors(ranks // tensor):
            micro_batch, rest = divmod(chunk, data)
            if rest or micro_batch > limits.micro_batch:
                continue
            width = Width(tensor, data, micro_batch)
            alone = StagedLayout(_base(((type_, -(-width.ranks // nodes.gpus)),), 1), (width,))
            each = least(StagedStep(predictor, alone).costs[0].layer)
            found.append(_Block(type_, nodes.count, width, ranks // width.ranks, each))
    return found


def _layouts(recipe: Recipe, blocks: tuple[_Block, ...]) -> Iterator[StagedLayout]:
    """The blocks in every order."""
    stages = sum(block.stages for block in blocks)
    chunk = blocks[0].width.data * blocks[0].width.micro_batch
    rounds = recipe.train.global_batch // chunk
    for order in permutations(blocks):
        placement = tuple((block.type, block.nodes) for block in order)
        widths = tuple(block.width for block in order for _ in range(block.stages))
        yield StagedLayout(_base(placement, stages, "1f1b" if rounds >= stages else "gpipe"), widths)


def _base(placement: Placement, pipeline: int, schedule: str = "1f1b") -> Layout:
    return Layout(1, 1, pipeline, 1, 1, 0, False, schedule, 1, "none", (), placement)


def _finished(
    predictor: Predictor, staged: StagedLayout, counts: tuple[int, ...], limits: SearchLimits
) -> StagedPlan | None:
    """The least recomputation, and sharding of the optimizer only where it is needed, that fit; None if none do."""
    for recompute in limits.recomputes:
        for zero in (0, 1):
            tried = replace(staged, base=replace(staged.base, recompute=recompute, zero=zero))
            step = StagedStep(predictor, tried)
            if not _fits(step, counts):
                continue
            better, _ = partition.improved(counts, step.seconds, step.at_least, partial(_fits, step), TRIES)
            whole = replace(tried, base=tried.base.with_partition(better))
            nodes = tried.base.placement
            cluster = predictor.cluster
            return StagedPlan(whole, step.parts(better), price_hour(cluster, nodes), watts(cluster, nodes))
    return None


def _fits(step: StagedStep, counts: tuple[int, ...]) -> bool:
    return all(room.fits for room in step.rooms(counts))


def _weight_of(cluster: Cluster, staged: StagedLayout, objective: str) -> float:
    nodes = staged.base.placement
    return weight(objective, price_hour(cluster, nodes), watts(cluster, nodes))
