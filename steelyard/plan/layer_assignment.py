"""Layers dealt out to the stages of a layout: evenly, by time, within memory, and then moved as long as it pays."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from steelyard.plan import memory_fit, partition
from steelyard.plan.layout import Layout
from steelyard.plan.predict import Predictor

REFINING = 40_000  # Passes simulated, about, to refine the partition of one of the best plans.


def evenly(predictor: Predictor, layout: Layout, layers: int) -> tuple[int, ...]:
    """As many layers for every stage."""
    stages = layout.pipeline * layout.virtual
    return (layers // stages,) * stages


def by_time(predictor: Predictor, layout: Layout, layers: int, limits: list[int] | None = None) -> tuple[int, ...]:
    """Layers by the time that each pipeline rank takes for one; none where the `limits` leave no room for all."""
    counts = partition.dealt(*predictor.step(layout).per_layer(), layers, limits)
    return partition.spread(counts, layout.virtual) if counts else ()


def limits(predictor: Predictor, layout: Layout, layers: int) -> list[int]:
    """The most layers that each pipeline rank has memory for, -1 where it has none even for no layer.

    A rank's memory depends on no other rank's layers and grows with its own, nearly in a straight line: two points of
    it tell where to look, and what is still open is halved, all ranks at once.
    """
    guess = _guessed(predictor, layout, layers, range(layout.pipeline))
    low, high = [-1] * layout.pipeline, [layers] * layout.pipeline
    for more in count():
        if low == high:
            break
        middle = [max(0, -(-(least + most) // 2)) for least, most in zip(low, high, strict=True)]
        if more < 2:  # The guess, which fits if it is right, and one layer more, which then does not.
            middle = [min(layers, known + more) for known in guess]
        for room in memory_fit.rooms(predictor, layout.with_partition(tuple(middle))):
            here = middle[room.rank]
            if room.fits:
                low[room.rank] = max(low[room.rank], here)
            else:
                high[room.rank] = min(high[room.rank], here - 1)
    return low


def _guessed(predictor: Predictor, layout: Layout, layers: int, ranks: Sequence[int]) -> list[int]:
    """Limits if memory grew in a straight line from one layer to two and on."""
    one, two = (
        memory_fit.rooms(predictor, layout.with_partition((number,) * layout.pipeline), ranks) for number in (1, 2)
    )
    return [
        max(0, min(layers, 1 + (less.usable - less.memory.total) // max(1, more.memory.total - less.memory.total)))
        for less, more in zip(one, two, strict=True)
    ]


def _is_hopeless(predictor: Predictor, layout: Layout, layers: int) -> bool:
    """Whether all ranks together have memory for fewer layers, by far: soon known, for most that are too full.

    Of ranks on like nodes the first or the last keeps the fewest micro-batches and has room for the most layers. What
    is guessed may be a layer off for each rank.
    """
    alike: dict[tuple[int, bool], list[int]] = {}
    for rank, kind in enumerate(predictor.kinds(layout)):
        alike.setdefault((kind, rank in (0, layout.pipeline - 1)), []).append(rank)
    guess = _guessed(predictor, layout, layers, [rank for same in alike.values() for rank in (same[0], same[-1])])
    most = sum(len(same) * max(guess[2 * number : 2 * number + 2]) for number, same in enumerate(alike.values()))
    return most + layout.pipeline < layers


def within(predictor: Predictor, layout: Layout, layers: int) -> Layout | None:
    """The layout with layers moved off the stages that are too full, where others have room for them."""
    if layout.pipeline == 1 or layout.virtual > 1 or _is_hopeless(predictor, layout, layers):
        return None
    most = limits(predictor, layout, layers)
    counts = by_time(predictor, layout, layers, most) if min(most) >= 0 else ()
    return layout.with_partition(counts) if counts else None


def refined(predictor: Predictor, layout: Layout, layers: int) -> Layout:
    """The layout with layers moved as long as its simulated step becomes shorter; as it is where no partition fits."""
    if layout.pipeline == 1:
        return layout
    step = predictor.step(layout)
    tries = max(8, REFINING // (layout.pipeline * layout.virtual * predictor.micro_batches(layout)))
    most = limits(predictor, layout, layers) if layout.virtual == 1 else None
    if most is not None and min(most) < 0:
        return layout

    def fits(counts: tuple[int, ...]) -> bool:
        if most is None:
            return memory_fit.fits(predictor, layout.with_partition(counts))
        return all(count <= limit for count, limit in zip(counts, most, strict=True))

    def seconds(counts: tuple[int, ...]) -> float:
        return step.seconds(counts, settled=True)

    starts = partition.starts(*step.per_layer(), layers, step.micro_batches, most)
    best, least = layout.partition, float("inf")
    for start in dict.fromkeys((layout.partition, *(partition.spread(counts, layout.virtual) for counts in starts))):
        if step.at_least(start) < least and fits(start) and (time := seconds(start)) < least:
            best, least = start, time
    if least == float("inf"):
        return layout
    counts, _ = partition.improved(best, seconds, step.at_least, fits, tries)
    return layout.with_partition(counts)
