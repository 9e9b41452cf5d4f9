"""Layers dealt out to the stages of a layout: evenly, by time, within memory, and then moved as long as it pays."""

from __future__ import annotations

from steelyard.plan import fit, partition
from steelyard.plan.layout import Layout
from steelyard.plan.predict import Predictor

REFINING = 5_000  # Passes simulated, about, to refine the partition of one of the best plans.
ROUNDS = 4  # Of moving layers off stages that are too full.


def evenly(predictor: Predictor, layout: Layout, layers: int) -> tuple[int, ...]:
    """As many layers for every stage."""
    stages = layout.pipeline * layout.virtual
    return (layers // stages,) * stages


def by_time(predictor: Predictor, layout: Layout, layers: int, limits: list[int] | None = None) -> tuple[int, ...]:
    """Layers by the time that each pipeline rank takes for one; none where the `limits` leave no room for all."""
    counts = partition.dealt(*predictor.step(layout).per_layer(), layers, limits)
    return partition.spread(counts, layout.virtual) if counts else ()


def within(predictor: Predictor, layout: Layout, layers: int) -> Layout | None:
    """The layout with layers moved off the stages that are too full, where others have room for them."""
    if layout.pipeline == 1 or layout.virtual > 1:
        return None
    rooms = fit.rooms(predictor, layout)
    limits = list(layout.partition)
    for _ in range(ROUNDS):
        for rank, room in enumerate(rooms):
            if not room.fits:
                limits[rank] = int(min(limits[rank] - 1, layout.partition[rank] * room.usable // room.memory.total))
            elif limits[rank] == layout.partition[rank]:
                limits[rank] = layers
        counts = by_time(predictor, layout, layers, limits) if min(limits) >= 0 else ()
        if not counts:
            return None
        layout = layout.with_partition(counts)
        rooms = fit.rooms(predictor, layout)
        if all(room.fits for room in rooms):
            return layout
    return None


def refined(predictor: Predictor, layout: Layout, layers: int) -> Layout:
    """The layout with layers moved as long as its simulated step becomes shorter."""
    if layout.pipeline == 1:
        return layout
    step = predictor.step(layout)
    tries = max(8, REFINING // (layout.pipeline * layout.virtual * predictor.micro_batches(layout)))

    def fits(counts: tuple[int, ...]) -> bool:
        return fit.fits(predictor, layout.with_partition(counts))

    def seconds(counts: tuple[int, ...]) -> float:
        return step.seconds(counts, settled=True)

    best = layout.partition
    for counts in partition.starts(*step.per_layer(), layers):
        start = partition.spread(counts, layout.virtual)
        if start == best or step.at_least(start) >= seconds(best):
            continue
        if seconds(start) < seconds(best) and fits(start):
            best = start
    counts, _ = partition.improved(best, seconds, step.at_least, fits, tries)
    return layout.with_partition(counts)
