"""Layers per stage: balance them by time, keep them within memory, and improve them by simulation.

All layers of a model cost the same on one rank. Assigning them one at a time, each to the stage that would finish it
first, minimizes the slowest stage: the result equals that of a dynamic program over cuts (the tests compare them). The
slowest stage does not determine the step alone: a stage's time also delays the stages after it when the pipeline fills
and drains. So `refined` moves single layers between stages as long as the simulated step becomes shorter.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from operator import itemgetter, le, mul

from steelyard.planning import memory_fit
from steelyard.planning.layer_moves import LayerMoves
from steelyard.planning.layout import Layout
from steelyard.planning.predict import Predictor
from steelyard.planning.step import StepCost

# Passes to simulate, approximately, to refine the partition of one plan: during the search, and of plans to show.
QUICKLY, FULLY = 2_000, 40_000
SHORTENED = 1.25  # Moving layers shortened no step by more than a sixth: slower ones than this are not refined.
SPARE = 3  # more layers per stage than a rank has, with which its memory is checked first


def evenly(step: StepCost) -> tuple[int, ...]:
    """The same number of layers on every stage."""
    stages = step.table.pipeline * step.table.virtual
    return (step.table.layers // stages,) * stages


def by_time(step: StepCost, limits: list[int] | None = None) -> tuple[int, ...]:
    """Layers balanced by their time on each pipeline rank; empty if the `limits` do not allow all layers."""
    counts = balanced(*step.per_layer(), step.table.layers, limits)
    return spread(counts, step.table.virtual) if counts else ()


def limits(predictor: Predictor, layout: Layout, layers: int) -> list[int]:
    """The maximum number of layers that each pipeline rank has memory for; -1 if it lacks memory for zero layers.

    The memory of a rank is nearly linear in its own layers and independent of other ranks. Two points give a guess, and
    a bisection of all ranks at once finds the exact number.
    """
    guess = _guessed(predictor, layout, layers, range(layout.pipeline))
    low, high = [-1] * layout.pipeline, [layers] * layout.pipeline
    more = 0
    while low != high:
        middle = [max(0, -(-(least + most) // 2)) for least, most in zip(low, high, strict=True)]
        if more < 2:  # The guess, which should fit, and one layer more, which should not.
            middle = [min(layers, known + more) for known in guess]
        for room in memory_fit.rooms(predictor, layout.with_partition(tuple(middle))):
            here = middle[room.rank]
            if room.fits:
                low[room.rank] = max(low[room.rank], here)
            else:
                high[room.rank] = min(high[room.rank], here - 1)
        more += 1
    return low


def _guessed(predictor: Predictor, layout: Layout, layers: int, ranks: Sequence[int]) -> list[int]:
    """Limits extrapolated linearly from the memory of one and of two layers."""
    one, two = (
        memory_fit.rooms(predictor, layout.with_partition((number,) * layout.pipeline), ranks) for number in (1, 2)
    )
    return [
        max(0, min(layers, 1 + (less.usable - less.memory.total) // max(1, more.memory.total - less.memory.total)))
        for less, more in zip(one, two, strict=True)
    ]


def _is_hopeless(predictor: Predictor, layout: Layout, layers: int) -> bool:
    """Whether all ranks together clearly lack memory for the layers: a fast check that rejects most such layouts.

    Among ranks on the same type of node, the first or the last keeps the fewest micro-batches and so fits the most
    layers. The guess may be wrong by one layer per rank.
    """
    alike: dict[tuple[int, bool], list[int]] = {}
    for rank, kind in enumerate(predictor.kinds(layout)):
        alike.setdefault((kind, rank in (0, layout.pipeline - 1)), []).append(rank)
    guess = _guessed(predictor, layout, layers, [rank for same in alike.values() for rank in (same[0], same[-1])])
    most = sum(len(same) * max(guess[2 * number : 2 * number + 2]) for number, same in enumerate(alike.values()))
    return most + layout.pipeline < layers


def within(predictor: Predictor, layout: Layout, layers: int) -> Layout | None:
    """The layout with layers moved from stages without enough memory to others; None if that is impossible."""
    if layout.pipeline == 1 or layout.virtual > 1 or _is_hopeless(predictor, layout, layers):
        return None
    most = limits(predictor, layout, layers)
    counts = by_time(predictor.step(layout), most) if min(most) >= 0 else ()
    return layout.with_partition(counts) if counts else None


def refined(
    predictor: Predictor, layout: Layout, layers: int, passes: int = FULLY, wanted: float = float("inf")
) -> Layout:
    """The layout with layers moved while its simulated step becomes shorter.

    Unchanged if no partition fits, or if none can be expected to take less than the `wanted` seconds.
    """
    step, least = predictor.step(layout), wanted * SHORTENED
    if layout.pipeline == 1 or step.at_least(layout.partition) >= least:
        return layout
    tries = max(8, passes // (layout.pipeline * layout.virtual * predictor.micro_batches(layout)))
    most = limits(predictor, layout, layers) if layout.virtual == 1 else None
    if most is not None and min(most) < 0:
        return layout

    fits = _memory_check(predictor, layout, most)
    moves = LayerMoves(step, fits)
    found = starts(*step.per_layer(), layers, step.table.micro_batches, most)
    best = None
    for start in dict.fromkeys((layout.partition, *(spread(counts, layout.virtual) for counts in found))):
        if step.at_least(start) < least:
            time = moves.simulated(start).seconds
            if time < least and fits(start):  # Checking memory costs more than simulating.
                best, least = start, time
    if best is None:
        return layout
    ways = (False, True) if passes > QUICKLY else (False,)  # Each ends where the other does not.
    ends = [moves.improved(best, tries, steepest) for steepest in ways]
    return layout.with_partition(min(ends, key=itemgetter(1))[0])


def _memory_check(predictor: Predictor, layout: Layout, limits: list[int] | None) -> Callable[[tuple[int, ...]], bool]:
    """Whether a partition fits: within the `limits` if they are known, or else rank by rank.

    More layers never take less memory: a rank that fits with `SPARE` more on each stage is not computed for fewer.
    """
    if limits is not None:
        return lambda counts: all(map(le, counts, limits))
    # The memory of a rank depends on its own layers only, if layers do not differ and no partition was measured.
    differ = len({layer.mlp for layer in predictor.recipe.model.blocks.layers}) > 1
    if differ or predictor.cluster.evidence.peaks:
        return lambda counts: all(room.fits for room in memory_fit.rooms(predictor, layout.with_partition(counts)))
    most = [(-1,) * layout.virtual] * layout.pipeline  # Layers that a rank is known to have memory for.
    tight: set[int] = set()

    def fits(counts: tuple[int, ...]) -> bool:
        for spare in (SPARE, 0):
            more = tuple([count + spare for count in counts])
            ranks = [rank for rank, room in enumerate(most) if not all(map(le, counts[rank :: layout.pipeline], room))]
            ranks = [rank for rank in ranks if not spare or rank not in tight]
            for room in memory_fit.rooms(predictor, layout.with_partition(more), ranks) if ranks else ():
                if room.fits:
                    most[room.rank] = more[room.rank :: layout.pipeline]
                elif not spare:
                    return False
                else:
                    tight.add(room.rank)
        return True

    return fits


def balanced(
    each: Sequence[float], extra: Sequence[float], layers: int, limits: Sequence[int] | None = None
) -> list[int]:
    """Layers per stage that minimize the slowest stage; a stage takes `each` seconds per layer plus `extra` seconds.

    On a tie the later stage gets the layer, because earlier stages keep more micro-batches in memory. Empty if `limits`
    do not allow all layers.
    """
    counts = [0] * len(each)
    queue = [(extra[stage] + each[stage], -stage) for stage in range(len(each))]
    heapq.heapify(queue)
    for _ in range(layers):
        while queue and limits is not None and counts[-queue[0][1]] >= limits[-queue[0][1]]:
            heapq.heappop(queue)
        if not queue:
            return []
        time, late = queue[0]
        counts[-late] += 1
        heapq.heapreplace(queue, (time + each[-late], late))
    return counts


def starts(
    each: Sequence[float], extra: Sequence[float], layers: int, rounds: int, limits: Sequence[int] | None = None
) -> list[tuple[int, ...]]:
    """Partitions from which `improved` starts; none if the `limits` do not allow all layers.

    Several partitions minimize the slowest stage: balanced, or filled from the first stage or from the last one. If a
    stage is the slowest because of the embedding or head alone, the other stages are also minimized. In addition, the
    exact minimum of (rounds - 1) x slowest stage + sum of all stages, the objective of published pipeline planners,
    with equally fast stages filled one after the other, or evenly with more on the last or on the first of them.
    """
    even = balanced(each, extra, layers, limits)
    if not even:
        return []
    stages = range(len(each))
    times = [extra[stage] + count * each[stage] for stage, count in enumerate(even)]
    slowest, slowest_filled = max(times), max(time for time, count in zip(times, even, strict=True) if count)
    found = [even]
    for order, bound in product((stages, stages[::-1]), (slowest, slowest_filled)):
        found.append(_packed(layers, _rooms(each, extra, bound, limits), order))
    found += _shortest(each, extra, layers, rounds, limits, slowest)
    return list(dict.fromkeys(map(tuple, found)))


def _shortest(
    each: Sequence[float], extra: Sequence[float], layers: int, rounds: int, limits: Sequence[int] | None, first: float
) -> list[list[int]]:
    """The minimum of (rounds - 1) x slowest stage + sum of stages, where the slowest takes at least `first` seconds.

    For each time of the slowest stage, filling the fastest stages first minimizes the sum.
    """
    stages = range(len(each))
    fastest = sorted(stages, key=lambda stage: each[stage])
    ends = {extra[stage] + count * each[stage] for stage in stages for count in range(layers + 1)}
    least, counts, rooms = float("inf"), [0] * len(each), [0] * len(each)
    sum_ = layers * min(each) * (1 - 1e-9)  # At least this much, whatever the slowest stage takes.
    for bound in sorted(end for end in ends if end >= first):
        if (rounds - 1) * bound + sum_ >= least:
            break
        room = _rooms(each, extra, bound, limits)
        filled = _packed(layers, room, fastest)
        seconds = (rounds - 1) * bound + sum(map(mul, filled, each))
        if seconds < least:
            least, counts, rooms = seconds, filled, room
    return [counts, *(_evened(each, extra, counts, rooms, order) for order in (stages, stages[::-1]))]


def _evened(
    each: Sequence[float], extra: Sequence[float], counts: list[int], rooms: list[int], order: Sequence[int]
) -> list[int]:
    """The same partition with the layers of the slowest non-empty stages balanced among all stages of that speed.

    If they cannot be equal, those at the end of the order get more.
    """
    slowest = max(one for one, count in zip(each, counts, strict=True) if count)
    alike = [stage for stage in order if each[stage] == slowest]
    layers = sum(counts[stage] for stage in alike)
    again = balanced(
        [slowest] * len(alike), [extra[stage] for stage in alike], layers, [rooms[stage] for stage in alike]
    )
    evened = list(counts)
    for stage, count in zip(alike, again, strict=True):
        evened[stage] = count
    return evened


def _rooms(each: Sequence[float], extra: Sequence[float], bound: float, limits: Sequence[int] | None) -> list[int]:
    """The maximum number of layers on each stage such that it takes at most `bound` seconds."""
    rooms = [max(0, int((bound * (1 + 1e-9) - more) / one)) for one, more in zip(each, extra, strict=True)]
    return [min(pair) for pair in zip(rooms, limits or rooms, strict=True)]


def _packed(layers: int, rooms: Sequence[int], order: Iterable[int]) -> list[int]:
    """Layers per stage if stages are filled one after the other in this order."""
    counts = [0] * len(rooms)
    for stage in order:
        counts[stage] = min(layers, rooms[stage])
        layers -= counts[stage]
    return counts


def spread(counts: Sequence[int], virtual: int) -> tuple[int, ...]:
    """Divide the layers of each pipeline rank among its `virtual` stages; the first and last stage get fewer."""
    stages = [0] * (len(counts) * virtual)
    for rank, count in enumerate(counts):
        for part in range(virtual):
            more = part < count % virtual if rank else part >= virtual - count % virtual
            stages[part * len(counts) + rank] = count // virtual + more
    return tuple(stages)
