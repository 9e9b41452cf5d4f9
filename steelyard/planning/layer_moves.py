"""Improve a partition by moving single layers between stages, simulating only moves that may shorten the step.

A simulated step ends with its critical path: a chain of actions, each of which started when the one before it ended.
Under another partition the same chain takes another time, which is a lower bound of that step. Most moves do not
shorten the critical path and are not simulated.

The bounds of all moves from one partition are computed together, in numpy: they are hundreds of thousands in a search.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import permutations
from typing import NamedTuple

import numpy as np

from steelyard.planning.step import Simulated, StepCost

Counts = tuple[int, ...]

MANY = 16  # With more stages than this, only some moves of a layer are tried, because trying all takes too long.
SHORTER = 1 - 1e-9  # A step is shorter than another one if it takes less than this share of its time.
NO_SHORTER = 1 - 1e-10  # A bound of this share rules a move out, whatever its rounding errors.


class LayerMoves:
    """The moves of layers of one step. What is simulated is kept: different moves often lead to the same partition."""

    def __init__(self, step: StepCost, allowed: Callable[[Counts], bool]) -> None:
        self.step, self.allowed = step, allowed
        self._simulated: dict[Counts, Simulated] = {}

    def simulated(self, counts: Counts) -> Simulated:
        """The simulated step."""
        if counts not in self._simulated:
            self._simulated[counts] = self.step.simulated(counts)
        return self._simulated[counts]

    def improved(self, counts: Counts, tries: int, steepest: bool = False) -> tuple[Counts, float]:
        """Move single layers while the simulated time decreases, with at most `tries` moves tried.

        Moves are tried in the order of their lower bound. The first one that shortens the step is made, or, if
        `steepest`, the best one. Moves whose bound is not below the best time are skipped.
        """
        best, seconds = counts, self.simulated(counts).seconds
        while True:
            before, moves = best, _moves(best)
            stages = _StageTimes(self.step, before)
            bounds = stages.at_least(moves)
            order = bounds.argsort(kind="stable")[: np.count_nonzero(bounds < seconds)]
            lengths = stages.path_lengths(self.simulated(before), moves)[order].tolist()
            for bound, length, number in zip(bounds[order].tolist(), lengths, order.tolist(), strict=True):
                if bound >= seconds or not tries or (best != before and not steepest):
                    break
                tries -= 1
                if length < seconds * NO_SHORTER:
                    moved = _moved(before, moves.ones[number], moves.others[number])
                    time = self.simulated(moved).seconds
                    if time < seconds * SHORTER and self.allowed(moved):
                        best, seconds = moved, time
            if best == before or not tries:
                return best, seconds


class _StageTimes:
    """What each stage takes under a partition, and with one layer less or more."""

    def __init__(self, step: StepCost, counts: Counts) -> None:
        self.step, self.counts = step, counts
        # No move takes a layer from a stage that has none.
        each = counts, tuple([max(0, count - 1) for count in counts]), tuple([count + 1 for count in counts])
        self.passes = np.array([step.passes(one) for one in each]).swapaxes(1, 2)
        """By partition, kind of pass and stage."""

    def at_least(self, moves: _Moves) -> np.ndarray:
        """`StepCost.at_least` of each move, to the last bit."""
        step, pipeline = self.step, self.step.table.pipeline
        forward, backward, weights = self.passes[:, 0], self.passes[:, 1], self.passes[:, 2]
        totals = forward + backward + weights
        if step.receive:
            totals = totals + np.array((0.0, *step.receive)) + np.array((*step.receive, 0.0))
        send = np.array((*step.send, 0.0))
        hops = forward + send + (0.0 if step.splits else backward + send)
        totals, hops = totals.take(moves.states), hops.take(moves.states[:, : pipeline - 1])
        busy = totals[:, :pipeline]
        for part in range(pipeline, len(self.counts), pipeline):
            busy = busy + totals[:, part : part + pipeline]
        busy = busy * step.table.micro_batches
        busy[:, 1:] += hops.cumsum(axis=1)
        if step.receive:
            busy[:, 1:] -= step.receive[: pipeline - 1]
        slowest: np.ndarray = busy.max(axis=1) + step.table.overhead
        return slowest

    def path_lengths(self, simulated: Simulated, moves: _Moves) -> np.ndarray:
        """What each move makes of the critical path, until the end of the step."""
        path = self.step.critical_path(self.counts, simulated)
        if path is None:
            return np.zeros(len(moves.ones))
        pipeline, rank = self.step.table.pipeline, path.rank
        less, more = ((self.passes[1:] - self.passes[0]) * path.visits).sum(axis=1)
        layers = sum(self.counts[rank::pipeline])
        same, fewer, further = (sum(self.step.after_layers(rank, max(0, layers + change))) for change in (0, -1, 1))
        less[rank::pipeline] += fewer - same
        more[rank::pipeline] += further - same
        lengths: np.ndarray = simulated.seconds + less[moves.ones] + more[moves.others]
        return lengths


class _Moves(NamedTuple):
    """Moves of a layer, in the order of the partitions that they lead to."""

    ones: np.ndarray
    """The stages that lose it."""
    others: np.ndarray
    """The stages that get it."""
    states: np.ndarray
    """Of each move and stage its index into what the stages take as they are, with a layer less, and with one more."""


def _moves(counts: Counts) -> _Moves:
    """Moves between any two stages; with more than `MANY` stages only from the fullest, or to a neighbour."""
    every = _all_moves(len(counts))
    if len(counts) <= MANY and min(counts):
        return every
    stages = np.array(counts)
    can = stages[every.ones] > 0
    if len(counts) > MANY:
        is_full = np.zeros(len(counts), dtype=bool)
        is_full[np.argsort(-stages, kind="stable")[:4]] = True
        can &= is_full[every.ones] | (abs(every.ones - every.others) == 1)
    return _Moves(*(each[can] for each in every))


@cache
def _all_moves(stages: int) -> _Moves:
    moves = sorted(permutations(range(stages), 2), key=lambda move: _moved((0,) * stages, *move))
    ones, others = np.array(moves, dtype=int).reshape(-1, 2).T
    states = np.tile(np.arange(stages), (len(ones), 1))
    states[np.arange(len(ones)), ones] += stages
    states[np.arange(len(ones)), others] += 2 * stages
    return _Moves(ones, others, states)


def _moved(counts: Counts, one: int, other: int) -> Counts:
    moved = list(counts)
    moved[one] -= 1
    moved[other] += 1
    return tuple(moved)
