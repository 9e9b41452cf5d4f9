"""A step of a pipeline, event by event.

Each pipeline rank works off its list of actions (`sizes.schedule.actions`, which is PyTorch's order, action by action).
A forward pass waits for the activations of the stage before, a backward pass for the gradients of the stage behind,
both for the rank to be free. So an action's start is the later of two known moments, and walking through all actions in
an order in which both are known gives the exact timetable, whatever the stages' times are. The order depends on the
schedule and the numbers alone and is kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from steelyard.core.recipe.parallel_section import ParallelSection
from steelyard.sizes.in_flight import actions

FORWARD, BACKWARD, WEIGHTS = 0, 1, 2
SETTLED = 8  # Rounds of a micro-batch for each rank after which a pipeline repeats itself, as good as always.
SHORT = 4000  # Passes up to which a step is always walked through to its end.
KINDS = {"forward": FORWARD, "backward": BACKWARD, "weights": WEIGHTS}


class PipelineAction(NamedTuple):
    """One action: who does it, what (kind x stages + stage), and which earlier action it waits for (-1: none)."""

    rank: int
    slot: int
    after: int
    micro_batch: int


@dataclass(frozen=True)
class Times:
    """Seconds by stage: of passes, and of sending to the stage behind and to the stage before.

    Where the backward pass is split in two (zero bubble), `backward` is the inputs' half and `weights` the weights'.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    weights: tuple[float, ...]
    send: tuple[float, ...]
    """From stage i to i + 1; one shorter than the others."""

    def everything(self) -> tuple[float, ...]:
        """All of them in a row, for comparing."""
        return self.forward + self.backward + self.weights + self.send


class Timetable(NamedTuple):
    """When each pipeline rank is done, and for how long it worked."""

    ends: tuple[float, ...]
    busy: tuple[float, ...]

    @property
    def makespan(self) -> float:
        """When the last is done."""
        return max(self.ends)


@lru_cache(maxsize=64)
def order(schedule: str, pipeline: int, virtual: int, micro_batches: int) -> tuple[PipelineAction, ...]:
    """All actions of all ranks in an order in which each comes after what it waits for."""
    parallel = ParallelSection().model_copy(update={"schedule": schedule, "pipeline": pipeline, "virtual": virtual})
    stages = pipeline * virtual
    queues = [_numbered(parallel, micro_batches, rank) for rank in range(pipeline)]
    size = stages * micro_batches
    done = [-1] * (3 * size)  # The number of the step that did it, by kind, stage and micro-batch.
    waiting = [-1] * (3 * size)  # The rank that waits for it.
    steps: list[PipelineAction] = []
    position = [0] * pipeline
    todo = list(range(pipeline))
    while todo:
        rank = todo.pop()
        queue, place = queues[rank], position[rank]
        while place < len(queue):
            kind, stage, micro_batch = queue[place]
            this = (kind * stages + stage) * micro_batches + micro_batch
            needed = _needed(kind, this, stage, stages, micro_batches)
            if needed >= 0 and done[needed] < 0:
                waiting[needed] = rank
                break
            steps.append(PipelineAction(rank, kind * stages + stage, done[needed] if needed >= 0 else -1, micro_batch))
            done[this] = len(steps) - 1
            place += 1
            if waiting[this] >= 0:
                todo.append(waiting[this])
        position[rank] = place
    if len(steps) != sum(map(len, queues)):
        raise AssertionError(f"{schedule} with {pipeline} ranks and {micro_batches} micro-batches never ends")
    return tuple(steps)


def _numbered(parallel: ParallelSection, micro_batches: int, rank: int) -> list[tuple[int, int, int]]:
    counts: dict[tuple[str, int], int] = {}
    queue = []
    for kind, local in actions(parallel, micro_batches, rank):
        number = counts.get((kind, local), 0)
        counts[kind, local] = number + 1
        queue.append((KINDS[kind], local * parallel.pipeline + rank, number))
    return queue


def _needed(kind: int, this: int, stage: int, stages: int, micro_batches: int) -> int:
    """The place in `done` of what an action waits for, or -1."""
    if kind == FORWARD:
        return this - micro_batches if stage else -1
    if kind == BACKWARD:
        return this + micro_batches if stage < stages - 1 else this - stages * micro_batches
    return this - stages * micro_batches


def simulate(times: Times, schedule: str, pipeline: int, virtual: int, micro_batches: int) -> Timetable:
    """The exact timetable of one step."""
    durations, delays = _durations(times), _delays(times)
    free = [0.0] * pipeline
    finish: list[float] = []
    for rank, slot, after, _ in order(schedule, pipeline, virtual, micro_batches):
        start = free[rank]
        if after >= 0:
            arrival = finish[after] + delays[slot]
            if arrival > start:
                start = arrival
        start += durations[slot]
        free[rank] = start
        finish.append(start)
    return Timetable(tuple(free), tuple(_busy(times, pipeline, micro_batches)))


def settled(times: Times, schedule: str, pipeline: int, virtual: int, micro_batches: int) -> tuple[float, ...]:
    """When each rank is done, of a long step only the first rounds being walked through.

    A pipeline soon repeats itself: then `pipeline` micro-batches more take as long as the last ones did. Searching may
    rely on that; what is shown of a plan is simulated to the end.
    """
    rounds = micro_batches // pipeline
    if rounds <= SETTLED + 1 or schedule == "gpipe" or micro_batches * len(times.forward) <= SHORT:
        return simulate(times, schedule, pipeline, virtual, micro_batches).ends
    # Rounds of other schedules are as many micro-batches as there are ranks, or nearly.
    few = SETTLED * pipeline + (micro_batches % pipeline if schedule == "1f1b" else 0)
    before = simulate(times, schedule, pipeline, virtual, few - pipeline).ends
    after = simulate(times, schedule, pipeline, virtual, few).ends
    more = (micro_batches - few) / pipeline
    return tuple(late + more * (late - early) for early, late in zip(before, after, strict=True))


def events(
    times: Times, schedule: str, pipeline: int, virtual: int, micro_batches: int
) -> list[tuple[int, str, int, int, float, float]]:
    """Every action with rank, kind, stage, micro-batch, start and end, for drawing."""
    durations, delays, stages = _durations(times), _delays(times), len(times.forward)
    names = list(KINDS)
    free = [0.0] * pipeline
    finish: list[float] = []
    drawn = []
    for rank, slot, after, micro_batch in order(schedule, pipeline, virtual, micro_batches):
        start = max(free[rank], finish[after] + delays[slot] if after >= 0 else 0.0)
        end = free[rank] = start + durations[slot]
        finish.append(end)
        drawn.append((rank, names[slot // stages], slot % stages, micro_batch, start, end))
    return drawn


def _durations(times: Times) -> list[float]:
    return [*times.forward, *times.backward, *times.weights]


def _delays(times: Times) -> list[float]:
    """What passes between the end of the awaited action and the arrival of what it sent, by slot."""
    return [0.0, *times.send, *times.send, 0.0, *(0.0 for _ in times.weights)]


def _busy(times: Times, pipeline: int, micro_batches: int) -> list[float]:
    each = [sum(three) for three in zip(times.forward, times.backward, times.weights, strict=True)]
    return [micro_batches * sum(each[rank::pipeline]) for rank in range(pipeline)]


def at_least(times: Times, pipeline: int, micro_batches: int) -> float:
    """A bound from below for any schedule: a rank's work, and the way of the first and last micro-batch to and from it.

    Exact for gpipe and 1f1b where all stages are alike and sending is free. Where gradients of weights are left for
    later, a rank's last work need not be waited for by others.
    """
    there, best = 0.0, 0.0
    late = any(times.weights)
    for rank, busy in enumerate(_busy(times, pipeline, micro_batches)):
        best = max(best, there + busy)
        if rank < len(times.send):
            there += times.forward[rank] + times.send[rank]
            there += 0.0 if late else times.backward[rank] + times.send[rank]
    return best
