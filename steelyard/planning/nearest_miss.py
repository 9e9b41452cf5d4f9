"""The nearest miss of a search without a plan: the layout that lacks the least memory, over all partitions.

During the search layers are balanced by time, so that a full stage lacks more memory than it has to.
"""

from __future__ import annotations

from steelyard.planning import layout_space, memory_fit
from steelyard.planning.candidates import Candidates
from steelyard.planning.layout import Layout
from steelyard.planning.partition import balanced
from steelyard.planning.predict import Predictor


def settle(candidates: Candidates) -> None:
    """Record the best partition of each mesh's lightest layout, which is among the excluded ones."""
    found, limits, layers = candidates.found, candidates.limits, candidates.recipe.model.layers
    for layout, _ in () if limits.even else tuple(found.excluded):
        zeros = layout_space.zeros(layout.pipeline, layout.data * layout.context, limits)
        if layout.recompute != limits.recomputes[-1] or layout.zero != zeros[-1]:
            continue
        predictor = candidates.predictor(layout)
        moved = _by_memory(predictor, layout, layers)
        if moved.partition != layout.partition:
            found.exclude(moved, memory_fit.rooms(predictor, moved))


def _by_memory(predictor: Predictor, layout: Layout, layers: int) -> Layout:
    """The layout with the layers per stage for which the fullest rank lacks the least memory.

    Exact if the memory of a rank is linear in its layers. Interleaved stages stay, as in `partition.within`.
    """
    if layout.pipeline == 1 or layout.virtual > 1:
        return layout
    one, two = (memory_fit.rooms(predictor, layout.with_partition((number,) * layout.pipeline)) for number in (1, 2))
    each = [max(1, more.memory.total - less.memory.total) for less, more in zip(one, two, strict=True)]
    lacks = [less.memory.total - less.usable - layer for less, layer in zip(one, each, strict=True)]
    return layout.with_partition(tuple(balanced(each, lacks, layers)))
