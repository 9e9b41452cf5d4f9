"""Compare every layout of a mesh with every partition, where these are few.

A search refines partitions by moving single layers, orders ZeRO stages by an estimate, and takes more recomputation
only if less does not fit. Each of these is nearly always right. In a small space every layout is compared instead, so
that the first plan is the best one.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, pairwise, product
from math import comb

from steelyard.planning import memory_fit
from steelyard.planning.candidates import Candidates, MeshCandidate
from steelyard.planning.layer_moves import SHORTER
from steelyard.planning.layout import Layout
from steelyard.planning.layout_space import Variant

MOST = 1_000_000  # Passes of all layouts that are compared; about a second if all of them have to be simulated.
EXTRA = 50  # What a layout costs besides its simulation, in passes.


def passes(candidates: Candidates, mesh: MeshCandidate) -> int:
    """Passes of the steps of all layouts of a mesh."""
    stages, layers = mesh.pipeline * mesh.virtual, candidates.recipe.model.layers
    partitions = 1 if candidates.limits.even else comb(layers + stages - 1, stages - 1)
    rounds = candidates.recipe.train.global_batch // (mesh.micro_batch * mesh.data)
    return partitions * len(_variants(candidates, mesh)) * (2 * stages * rounds + EXTRA)


def fastest(candidates: Candidates, mesh: MeshCandidate, limit: float) -> Layout | None:
    """The fastest layout of a mesh that fits and takes less than `limit` seconds."""
    stages, layers = mesh.pipeline * mesh.virtual, candidates.recipe.model.layers
    best, limit = None, limit * SHORTER
    for variant in _variants(candidates, mesh):
        layout = mesh.layout(variant)
        predictor = candidates.predictor(layout)
        if predictor.bound(layout) >= limit:
            continue
        candidates.found.looked_at += 1
        step = predictor.step(layout)
        every = [candidates.balanced(step)] if candidates.limits.even else partitions(layers, stages)
        for bound, counts in sorted((step.at_least(counts), counts) for counts in every):
            if bound >= limit:
                break
            seconds = step.seconds(counts)
            if seconds < limit and memory_fit.fits(predictor, layout.with_partition(counts)):
                best, limit = layout.with_partition(counts), seconds
    return best


def partitions(layers: int, stages: int) -> Iterator[tuple[int, ...]]:
    """All ways to divide `layers` layers among stages."""
    for ends in combinations(range(layers + stages - 1), stages - 1):
        bounds = (-1, *ends, layers + stages - 1)
        yield tuple([end - begin - 1 for begin, end in pairwise(bounds)])


def _variants(candidates: Candidates, mesh: MeshCandidate) -> list[Variant]:
    each = product(candidates.limits.recomputes, candidates.zeros(mesh), candidates.sequences(mesh))
    return [Variant(*one) for one in each]
