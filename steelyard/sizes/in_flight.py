"""The number of micro-batches in flight on a pipeline rank.

A schedule is a list of actions on the stages of a rank. A forward pass allocates memory. A backward pass frees it,
unless the schedule delays the weight gradients, as zero bubble does. The order is that of torch.distributed.pipelining
(`ScheduleGPipe`, `Schedule1F1B`, `ScheduleInterleaved1F1B`, `ScheduleInterleavedZeroBubble`); the tests compare both.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Literal, NamedTuple

from steelyard.core.recipe.parallel_section import ParallelSection

Kind = Literal["forward", "backward", "weights"]


class Action(NamedTuple):
    """One pass of one micro-batch through a stage; `local` is the index of the stage on its rank."""

    kind: Kind
    local: int


def actions(parallel: ParallelSection, micro_batches: int, rank: int) -> Iterator[Action]:
    """The actions of one pipeline rank in a step, in order. `weights` follows `backward` if they are split."""
    total = micro_batches * parallel.virtual
    late = parallel.schedule == "zero-bubble"
    if parallel.stages == 1:  # No pipeline: micro-batches run one after the other.
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
    """Micro-batches per stage of a rank that wait for their backward pass, and for their weight gradients."""

    waiting: tuple[int, ...]
    held: tuple[int, ...]


def in_flight(parallel: ParallelSection, micro_batches: int, rank: int) -> set[InFlight]:
    """Every state of a pipeline rank's memory in a step."""
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
    """The states (waiting, then held) that include the one with the most memory: no other state exceeds all of them.

    Cached, because a search needs the same few thousands of times. With one stage per rank there is a closed form.
    """
    if virtual == 1 and (pipeline == 1 or schedule in ("gpipe", "1f1b")):
        waiting = 1 if pipeline == 1 else micro_batches if schedule == "gpipe" else min(micro_batches, pipeline - rank)
        return ((waiting, 0),)
    parallel = ParallelSection().model_copy(update={"schedule": schedule, "pipeline": pipeline, "virtual": virtual})
    states = sorted({state.waiting + state.held for state in in_flight(parallel, micro_batches, rank)}, reverse=True)
    # The state after a forward pass exceeds the one before it: of neighbours in this order only the larger is needed.
    return tuple(
        state
        for number, state in enumerate(states)
        if not number or any(a > b for a, b in zip(state, states[number - 1], strict=True))
    )


def _round(parallel: ParallelSection, micro_batches: int) -> int:
    """Micro-batches that pass through one stage of a rank before its next stage runs."""
    return micro_batches // max(1, micro_batches // parallel.pipeline)
