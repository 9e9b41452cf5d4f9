"""A lower bound for the time of a step over all partitions, from four numbers per pipeline rank.

A pipeline rank with k layers finishes no earlier than the time for all micro-batches to pass its k layers, plus the
time for the first micro-batch to arrive, plus the reduction of the gradients of k layers. The number of layers that fit
into T seconds under these constraints is a linear program. Any feasible solution of its dual gives an upper bound for
that number; this one is built from the last rank to the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from steelyard.planning.communication import Ring
from steelyard.planning.cost_table import RankParams, StageCost
from steelyard.planning.weight_copies import RankCopies


class RankBound(NamedTuple):
    """The least seconds that a pipeline rank takes."""

    layer: float
    """For both passes of a layer."""
    after: float
    """What a layer adds after the last backward pass."""
    embedding: float
    """For both passes of the embedding, in addition to those of the layers."""
    head: float

    @classmethod
    def of(cls, params: RankParams, cost: StageCost, copies: RankCopies, ring: Ring, is_piped: bool) -> RankBound:
        """The bounds of a rank with these costs, whose gradients are reduced on `ring`.

        The optimizer update is excluded: while a rank updates, the gradients that it sent are still passing through the
        ranks before it.
        """
        gpu, host = cost.layer.gpu + copies.of_layer(params.layer, params.experts), cost.layer.host + sum(copies.host)
        after = 0.0
        if is_piped:
            shortest = min(ring.all_reduce(2 * params.layer), ring.gather(4 * params.layer))
            after = shortest - ring.gather(0.0) * 2
        # The host overlaps with the GPU, so a rank takes at least as long as the one of them that has more to do.
        if host > gpu:
            return cls(host, after, cost.embedding.host, cost.head.host)
        return cls(gpu, after, cost.embedding.gpu, cost.head.gpu)


def step_bound(
    runs: Sequence[tuple[RankBound, float, int]], layers: int, rounds: int, virtual: int, schedule: str
) -> float:
    """Seconds of a step of `rounds` micro-batches.

    A run is a number of neighbouring ranks that are the same, and the seconds to send from each of them to the next.
    """
    late, ways = schedule == "zero-bubble", ways_before(virtual, schedule)
    (first, *_), (last, *_) = runs[0], runs[-1]
    behind = waited = weight = 0.0
    for rank, send, count in reversed(runs):
        before, busy = rank.layer / ways, rounds * rank.layer + rank.after
        for _ in range(count):
            waited += behind * send
            weight = (1 - before * behind) / busy
            if weight > 0:
                behind += weight
    weight = max(0.0, weight)
    taken = rounds * (weight * first.embedding + last.head / (rounds * last.layer + last.after))
    taken += (behind - weight) * first.embedding / ways + waited * (1 if late else 2)
    return (layers + taken) / behind


def ways_before(virtual: int, schedule: str) -> int:
    """The share of a rank's work for a micro-batch that must come before the next rank begins is one in so many."""
    ways = virtual if virtual == 1 else 2 * virtual  # A rank's first stage may hold less than its share.
    return ways * (3 if schedule == "zero-bubble" else 1)  # There only the forward pass, about a third of the work.


def fastest_order(runs: Sequence[tuple[float, int]], layers: int, rounds: int, virtual: int, schedule: str) -> float:
    """A lower bound for `step_bound` in any order of the ranks.

    A run is the least seconds of a layer, and the number of ranks that take as long, the fastest first. Without sends
    and ends, `step_bound` divides the layers by a sum of speeds, to which ranks contribute less the later they are: the
    fastest ranks first make it the largest.
    """
    kept = 1 - 1 / (ways_before(virtual, schedule) * rounds)
    behind = 0.0
    for layer, count in reversed(runs):
        power = kept**count
        behind = behind * power + (1 - power) / (1 - kept) / (rounds * layer)
    return layers / behind * (1 - 1e-9)
