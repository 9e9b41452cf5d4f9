"""A step whose pipeline stages have tensor and data widths of their own: for planning, since the engine has one mesh.

A step is `rounds` rounds; in each, a stage takes a chunk of the global batch and deals it out among its data ranks, so
that a stage of d data ranks works with micro-batches of chunk / d samples. Between stages of unlike widths activations
change hands: every rank of the next stage needs its own samples (and, where the sequence is cut along the tensor axis,
its own piece of them), and the ranks that hold these share the work of sending evenly. Stages of like widths send as
they do in any plan, so that equal widths everywhere give exactly the uniform plan's time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from steelyard.core.recipe import Recipe
from steelyard.plan import communication, memory_fit
from steelyard.plan.communication import Ring, group
from steelyard.plan.layout import Layout, Seat, Seats
from steelyard.plan.predict import Predictor
from steelyard.plan.step import StepCost
from steelyard.sizes.memory import memory_of


@dataclass(frozen=True)
class Width:
    """The ranks of one stage, and the samples that one of its data ranks takes at a time."""

    tensor: int
    data: int
    micro_batch: int

    @property
    def ranks(self) -> int:
        """Of the stage."""
        return self.tensor * self.data


@dataclass(frozen=True)
class StagedLayout:
    """A layout with a width for each stage; of `base`, tensor, data and micro-batch do not count."""

    base: Layout
    widths: tuple[Width, ...]

    def at(self, stage: int, recipe: Recipe) -> Layout:
        """The uniform layout that one stage looks like from inside."""
        width = self.widths[stage]
        parallel = width.tensor > 1 and recipe.data.sequence_length % width.tensor == 0
        return replace(
            self.base, tensor=width.tensor, data=width.data, micro_batch=width.micro_batch, sequence_parallel=parallel
        )

    @property
    def world(self) -> int:
        """Ranks in all."""
        return sum(width.ranks for width in self.widths)

    @property
    def is_uniform(self) -> bool:
        """Whether the engine could run it: all stages are alike."""
        return len(set(self.widths)) == 1


class StagedStep(StepCost):
    """The step of such a layout, but for its partition."""

    def __init__(self, predictor: Predictor, staged: StagedLayout) -> None:
        self.staged, self.each = staged, [staged.at(n, predictor.recipe) for n in range(len(staged.widths))]
        self.placed = _placed(predictor, staged)
        costs = [predictor.stage_cost(*pair) for pair in zip(self.each, self.placed, strict=True)]
        rings: list[Ring] = [
            group(predictor.cluster, seats, width.tensor, width.data)
            for width, seats in zip(staged.widths, self.placed, strict=True)
        ]
        super().__init__(predictor, self.each[0], costs, self._sends(predictor), rings)

    def _sends(self, predictor: Predictor) -> tuple[float, ...]:
        found = []
        for number, (one, other) in enumerate(zip(self.each, self.each[1:], strict=False)):
            seats = self.placed[number], self.placed[number + 1]
            if self.staged.widths[number] == self.staged.widths[number + 1]:
                found.append(predictor.send(one, *seats))
            else:
                there, back = resharded(predictor, one, other, *seats), resharded(predictor, other, one, *seats[::-1])
                found.append(max(there, back))
        return tuple(found)

    def _layout_of(self, rank: int) -> Layout:
        return self.each[rank]

    def _seats_of(self, rank: int) -> Sequence[Seat]:
        return self.placed[rank]

    def rooms(self, counts: tuple[int, ...]) -> list[memory_fit.Room]:
        """The memory of each stage's ranks."""
        found = []
        for rank, (layout, seats) in enumerate(zip(self.each, self.placed, strict=True)):
            whole = layout.with_partition(counts)
            [memory] = memory_of(whole.applied(self.predictor.recipe), whole.world, [rank])
            found.append(memory_fit.room(self.predictor, rank, memory, seats))
        return found


def _placed(predictor: Predictor, staged: StagedLayout) -> list[tuple[Seat, ...]]:
    """The seats of each stage: ranks lie one after the other on the nodes, as everywhere."""
    seats, first, found = Seats(predictor.cluster, staged.base.placement), 0, []
    for width in staged.widths:
        found.append(seats.of(first, width.ranks))
        first += width.ranks
    return found


def resharded(
    predictor: Predictor, one: Layout, other: Layout, senders: Sequence[Seat], receivers: Sequence[Seat]
) -> float:
    """Seconds to hand a chunk's activations, or their gradients, to a stage of another width."""
    dims, scattered = predictor.dims, predictor.software.scattered
    cuts = [layout.tensor if layout.sequence_parallel or scattered else 1 for layout in (one, other)]
    received = predictor.each * other.micro_batch * dims.sequence * dims.hidden / cuts[1]
    sent = received * (other.tensor * other.data) / (one.tensor * one.data)
    # A rank receives from every data rank that its samples lie on, and every piece of them.
    arriving = -(-one.data // other.data) * -(-cuts[0] // cuts[1])
    leaving = -(-arriving * other.tensor * other.data // (one.tensor * one.data))
    messages = max(arriving, leaving)
    return max(
        communication.exchange(predictor.cluster, a, b, sent, received, messages) for a in senders for b in receivers
    )
