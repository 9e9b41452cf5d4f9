"""Layers per stage, for stages that are not alike.

All layers of a model are alike, so dealing them out one at a time, each to the stage that would be done first with it,
makes the slowest stage as fast as can be: the exact answer of a dynamic program over cuts, without the program (the
tests compare them). The slowest stage is not all, though: a stage's time also delays the stages behind it when a step
begins and ends. So the exact simulation is asked whether moving a layer from one stage to another helps, until no move
does.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence

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


def starts(each: Sequence[float], extra: Sequence[float], layers: int) -> list[tuple[int, ...]]:
    """Partitions whose slowest stage takes the least, of which there may be many: dealt out, and packed to either end.

    Packed means that stages take as many layers as the slowest one's time allows, from the first on or the last.
    """
    found = [dealt(each, extra, layers)]
    slowest = max(extra[stage] + count * each[stage] for stage, count in enumerate(found[0])) * (1 + 1e-9)
    room = [max(0, int((slowest - extra[stage]) / each[stage])) for stage in range(len(each))]
    for order in (range(len(each)), range(len(each) - 1, -1, -1)):
        counts, left = [0] * len(each), layers
        for stage in order:
            counts[stage] = min(left, room[stage])
            left -= counts[stage]
        if not left:
            found.append(counts)
    return list(dict.fromkeys(map(tuple, found)))


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
            if time < seconds * (1 - 1e-9) and allowed(moved):
                best, seconds = moved, time
                break
        else:
            return best, seconds


def _moved(counts: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """A layer less on one of the fullest stages and one more anywhere, or a layer to a neighbour."""
    stages = range(len(counts))
    fullest = sorted(stages, key=lambda stage: -counts[stage])[:4]
    pairs = {(one, other) for one in fullest for other in stages if one != other}
    pairs |= {(one, other) for one in stages for other in (one - 1, one + 1) if 0 <= other < len(counts)}
    for one, other in sorted(pairs):
        if counts[one]:
            moved = list(counts)
            moved[one] -= 1
            moved[other] += 1
            yield tuple(moved)
