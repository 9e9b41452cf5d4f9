"""Layers per stage, for stages that are not alike.

All layers of a model are alike, so dealing them out one at a time, each to the stage that would be done first with it,
makes the slowest stage as fast as can be: the exact answer of a dynamic program over cuts, without the program (the
tests compare them). The slowest stage is not all, though: a stage's time also delays the stages behind it when a step
begins and ends. So the exact simulation is asked whether moving a layer from one stage to another helps, until no move
does.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import product
from operator import mul

MANY = 16  # Stages up to which a layer is moved from any to any other: beyond, trying all takes too long.

Simulated = Callable[[tuple[int, ...]], float]


def dealt(each: Sequence[float], extra: Sequence[float], layers: int, limits: Sequence[int] | None = None) -> list[int]:
    """Layers per stage, a stage taking `each` seconds per layer and `extra` seconds beside; `limits` bound them.

    Between equals the later stage gets the layer: earlier ones keep more micro-batches in memory. Empty where the
    limits leave no room.
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
    """Partitions from which to look further; none where the `limits` leave no room.

    Those whose slowest stage takes the least, of which there may be many: dealt out, or packed from the first stage on
    or from the last; where embedding or head alone make a stage the slowest, also with the other stages as fast as can
    be. And the exact answer of the dynamic program that planners of pipelines use, which makes (rounds - 1) x the
    slowest stage + the sum of all stages the least, with equally fast stages filled in a row or evenly.
    """
    even = dealt(each, extra, layers, limits)
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
    """The least (rounds - 1) x slowest stage + sum of stages, the slowest taking `first` seconds at the least.

    For each time that the slowest may take, filling the fastest stages first makes the sum the least.
    """
    stages = range(len(each))
    fastest = sorted(stages, key=lambda stage: each[stage])
    ends = {extra[stage] + count * each[stage] for stage in stages for count in range(layers + 1)}
    least, counts, rooms = float("inf"), [0] * len(each), [0] * len(each)
    for bound in sorted(end for end in ends if end >= first):
        if (rounds - 1) * bound >= least:
            break
        room = _rooms(each, extra, bound, limits)
        filled = _packed(layers, room, fastest)
        seconds = (rounds - 1) * bound + sum(map(mul, filled, each))
        if seconds < least:
            least, counts, rooms = seconds, filled, room
    return [counts, _evened(each, extra, counts, rooms)]


def _evened(each: Sequence[float], extra: Sequence[float], counts: list[int], rooms: list[int]) -> list[int]:
    """The same with the layers of the slowest stages that have any dealt out evenly among all that are as slow."""
    slowest = max(one for one, count in zip(each, counts, strict=True) if count)
    alike = [stage for stage in range(len(each)) if each[stage] == slowest]
    layers = sum(counts[stage] for stage in alike)
    again = dealt([slowest] * len(alike), [extra[stage] for stage in alike], layers, [rooms[stage] for stage in alike])
    evened = list(counts)
    for stage, count in zip(alike, again, strict=True):
        evened[stage] = count
    return evened


def _rooms(each: Sequence[float], extra: Sequence[float], bound: float, limits: Sequence[int] | None) -> list[int]:
    """Layers that each stage may have for none to take longer than `bound`."""
    rooms = [max(0, int((bound * (1 + 1e-9) - more) / one)) for one, more in zip(each, extra, strict=True)]
    return [min(pair) for pair in zip(rooms, limits or rooms, strict=True)]


def _packed(layers: int, rooms: Sequence[int], order: Iterable[int]) -> list[int]:
    """Stages filled one after the other, in this order."""
    counts = [0] * len(rooms)
    for stage in order:
        counts[stage] = min(layers, rooms[stage])
        layers -= counts[stage]
    return counts


def spread(counts: Sequence[int], virtual: int) -> tuple[int, ...]:
    """The layers of each pipeline rank spread over its `virtual` stages; the ends of the model get the fewer."""
    stages = [0] * (len(counts) * virtual)
    for rank, count in enumerate(counts):
        for part in range(virtual):
            more = part < count % virtual if rank else part >= virtual - count % virtual
            stages[part * len(counts) + rank] = count // virtual + more
    return tuple(stages)


def improved(
    counts: tuple[int, ...],
    simulated: Simulated,
    at_least: Simulated,
    allowed: Callable[[tuple[int, ...]], bool],
    tries: int,
) -> tuple[tuple[int, ...], float]:
    """Move layers between stages one at a time, as long as the simulated time falls; at most `tries` simulations.

    Moves are simulated in the order of their bound, and those whose bound is no better than what is reached not at all.
    """
    best, seconds = counts, simulated(counts)
    while True:
        moves = sorted((at_least(moved), moved) for moved in _moved(best))
        for bound, moved in moves:
            if bound >= seconds or not tries:
                return best, seconds
            tries -= 1
            time = simulated(moved)
            if time < seconds * (1 - 1e-9) and allowed(moved):  # Whether a move fits costs more than its simulation.
                best, seconds = moved, time
                break
        else:
            return best, seconds


def _moved(counts: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """A layer from any stage to any other; of more stages than `MANY` only from the fullest, or to a neighbour."""
    stages = range(len(counts))
    fullest = sorted(stages, key=lambda stage: -counts[stage])[: 4 if len(counts) > MANY else len(counts)]
    pairs = {(one, other) for one in fullest for other in stages if one != other}
    pairs |= {(one, other) for one in stages for other in (one - 1, one + 1) if 0 <= other < len(counts)}
    for one, other in sorted(pairs):
        if counts[one]:
            moved = list(counts)
            moved[one] -= 1
            moved[other] += 1
            yield tuple(moved)
