"""How many micro-batches a pipeline rank keeps in memory at once.

A schedule is a list of actions on a rank's stages: a forward pass fills memory; a backward pass empties it, unless the
gradients of the weights are left for later, as the zero-bubble schedule does. The order is that of
torch.distributed.pipelining (`ScheduleGPipe`, `Schedule1F1B`, `ScheduleInterleaved1F1B`,
`ScheduleInterleavedZeroBubble`), which the tests compare it with.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Literal, NamedTuple

from steelyard.core.recipe.parallel_section import ParallelSection

Kind = Literal["forward", "backward", "weights"]


class Action(NamedTuple):
    """One pass of one micro-batch through a stage; `local` numbers the stages of a rank from 0."""

    kind: Kind
    local: int


def actions(parallel: ParallelSection, micro_batches: int, rank: int) -> Iterator[Action]:
    """What one pipeline rank does in a step, in order. `weights` follows `backward` where the two are apart."""
    total = micro_batches * parallel.virtual
    late = parallel.schedule == "zero-bubble"
    if parallel.stages == 1:  # No pipeline: micro-batches come one after the other.
        warm_up, late = 0, False
    elif parallel.schedule == "gpipe":
        warm_up = total
    elif parallel.schedule == "1f1b":
        warm_up = parallel.pipeline - 1 - rank
    else:
        hops = parallel.pipeline - 1 - rank
        warm_up = (parallel.virtual - 1) * _round(parallel, micro_batches) + (hops if late else 2 * hops)
    warm_up = min(warm_up, total)
    round_, virtual = _round(parallel, micro_batches), parallel.virtual
    forward = [Action("forward", local) for local in range(virtual)]
    backward = [Action("backward", virtual - 1 - local) for local in range(virtual)]
    weights = [Action("weights", virtual - 1 - local) for local in range(virtual)]
    for number in range(warm_up):
        yield forward[number // round_ % virtual]
    for number in range(total):
        if number + warm_up < total:
            yield forward[(number + warm_up) // round_ % virtual]
        yield backward[number // round_ % virtual]
        if late and number >= rank:
            yield weights[(number - rank) // round_ % virtual]
    for number in range(max(0, total - rank), total) if late else ():
        yield weights[number // round_ % virtual]


class InFlight(NamedTuple):
    """Micro-batches at one moment, by stage of the rank: waiting for their backward pass, and for their weights'."""

    waiting: tuple[int, ...]
    held: tuple[int, ...]


def in_flight(parallel: ParallelSection, micro_batches: int, rank: int) -> set[InFlight]:
    """Every state that the memory of a pipeline rank passes through in a step."""
    waiting, held = [0] * parallel.virtual, [0] * parallel.virtual
    late = parallel.schedule == "zero-bubble" and parallel.stages > 1
    seen = set()
    for action in actions(parallel, micro_batches, rank):
        if action.kind == "forward":
            waiting[action.local] += 1
        elif action.kind == "backward":
            waiting[action.local] -= 1
            held[action.local] += late
        else:
            held[action.local] -= 1
        seen.add(InFlight(tuple(waiting), tuple(held)))
    return seen


@lru_cache(maxsize=4096)
def fullest(schedule: str, pipeline: int, virtual: int, micro_batches: int, rank: int) -> tuple[tuple[int, ...], ...]:
    """Of those states, waiting then held, at least the ones that no other exceeds: the fullest moment is among them.

    Kept, since a planner asks for the same few by the thousand; with one stage per rank it is known without walking.
    """
    if virtual == 1 and (pipeline == 1 or schedule in ("gpipe", "1f1b")):
        waiting = 1 if pipeline == 1 else micro_batches if schedule == "gpipe" else min(micro_batches, pipeline - rank)
        return ((waiting, 0),)
    parallel = ParallelSection().model_copy(update={"schedule": schedule, "pipeline": pipeline, "virtual": virtual})
    states = sorted({state.waiting + state.held for state in in_flight(parallel, micro_batches, rank)}, reverse=True)
    # A state right after a forward pass exceeds the one before it: of neighbours in this order the larger is enough.
    return tuple(
        state
        for number, state in enumerate(states)
        if not number or any(a > b for a, b in zip(state, states[number - 1], strict=True))
    )


def _round(parallel: ParallelSection, micro_batches: int) -> int:
    """Micro-batches that pass through one stage of a rank before its next stage has its turn."""
    return micro_batches // max(1, micro_batches // parallel.pipeline)
