"""Event-by-event simulation of one pipeline step.

Each pipeline rank runs its list of actions (`sizes.in_flight.actions`, which follows PyTorch's schedules). A forward
pass waits for the activations of the previous stage, a backward pass for the gradients of the next stage, and both wait
until the rank is free. So the start of an action is the later of two times, and processing the actions in topological
order gives the exact timetable for any stage times. The order depends only on the schedule and the sizes and is cached.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from steelyard.core.recipe.parallel_section import ParallelSection
from steelyard.sizes.in_flight import actions

FORWARD, BACKWARD, WEIGHTS = 0, 1, 2
SETTLED = 8  # Rounds of one micro-batch per rank after which a pipeline almost always is periodic.
SHORT = 4000  # Steps with at most this many passes are always simulated completely.
KINDS = {"forward": FORWARD, "backward": BACKWARD, "weights": WEIGHTS}


class ActionOrder(NamedTuple):
    """All actions of all ranks in topological order. They are numbered from 1; 0 is the start of the step."""

    steps: list[tuple[int, int, int]]
    """Of each action its slot (kind x stages + stage), the previous action of its rank, and the one that it waits for.

    Plain tuples, because a search reads millions of them.
    """
    places: list[tuple[int, int]]
    """Of each action its rank and micro-batch."""
    last: list[int]
    """The last action of each rank."""


class Times(NamedTuple):
    """Seconds of the passes of each stage, and of the sends between neighbouring stages.

    If the backward pass is split (zero bubble), `backward` computes input gradients and `weights` weight gradients.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    weights: tuple[float, ...]
    send: tuple[float, ...]
    """From stage i to i + 1; one entry fewer than the others."""
    receive: tuple[float, ...] = ()
    """Seconds during which a receive from stage i by stage i + 1, or back, blocks the receiver; empty: never.

    The receiver is blocked while the sender sends, so a receive takes no time of its own if the receiver was idle.
    """

    def everything(self) -> tuple[float, ...]:
        """All values in one tuple, for comparisons."""
        return self.forward + self.backward + self.weights + self.send + self.receive

    def by_slot(self) -> list[float]:
        """Seconds of the actions in each slot (kind x stages + stage)."""
        return [*self.forward, *self.backward, *self.weights]


class CriticalPath(NamedTuple):
    """A chain of actions from the start of a step to the end of a rank, without a wait."""

    rank: int
    visits: list[list[int]]
    """The number of its actions by kind and stage."""


class Timetable(NamedTuple):
    """When each pipeline rank finishes, and how long it is busy."""

    ends: tuple[float, ...]
    busy: tuple[float, ...]

    @property
    def makespan(self) -> float:
        """When the last rank finishes."""
        return max(self.ends)


@lru_cache(maxsize=256)
def order(schedule: str, pipeline: int, virtual: int, micro_batches: int) -> ActionOrder:
    """All actions of all ranks in topological order."""
    parallel = ParallelSection().model_copy(update={"schedule": schedule, "pipeline": pipeline, "virtual": virtual})
    stages = pipeline * virtual
    queues = [_numbered(parallel, micro_batches, rank) for rank in range(pipeline)]
    size = stages * micro_batches
    done = [0] * (3 * size)  # The number of the action, by kind, stage and micro-batch.
    waiting = [-1] * (3 * size)  # The rank that waits for this action.
    found = ActionOrder([], [], [0] * pipeline)
    position = [0] * pipeline
    todo = list(range(pipeline))
    while todo:
        rank = todo.pop()
        queue, place = queues[rank], position[rank]
        while place < len(queue):
            kind, stage, micro_batch = queue[place]
            this = (kind * stages + stage) * micro_batches + micro_batch
            needed = _needed(kind, this, stage, stages, micro_batches)
            if needed >= 0 and not done[needed]:
                waiting[needed] = rank
                break
            after = done[needed] if needed >= 0 else 0
            found.steps.append((kind * stages + stage, found.last[rank], after))
            found.places.append((rank, micro_batch))
            done[this] = found.last[rank] = len(found.steps)
            place += 1
            if waiting[this] >= 0:
                todo.append(waiting[this])
        position[rank] = place
    if len(found.steps) != sum(map(len, queues)):
        raise AssertionError(f"{schedule} with {pipeline} ranks and {micro_batches} micro-batches deadlocks")
    return found


def _numbered(parallel: ParallelSection, micro_batches: int, rank: int) -> list[tuple[int, int, int]]:
    counts: dict[tuple[str, int], int] = {}
    queue = []
    for kind, local in actions(parallel, micro_batches, rank):
        number = counts.get((kind, local), 0)
        counts[kind, local] = number + 1
        queue.append((KINDS[kind], local * parallel.pipeline + rank, number))
    return queue


def _needed(kind: int, this: int, stage: int, stages: int, micro_batches: int) -> int:
    """The index into `done` of the action that an action waits for, or -1."""
    if kind == FORWARD:
        return this - micro_batches if stage else -1
    if kind == BACKWARD:
        return this + micro_batches if stage < stages - 1 else this - stages * micro_batches
    return this - stages * micro_batches


def simulate(times: Times, schedule: str, pipeline: int, virtual: int, micro_batches: int) -> Timetable:
    """The exact timetable of one step."""
    ends = simulated_ends(times, schedule, pipeline, virtual, micro_batches)
    return Timetable(ends, tuple(_busy(times, pipeline, micro_batches)))


def simulated_ends(times: Times, schedule: str, pipeline: int, virtual: int, micro_batches: int) -> tuple[float, ...]:
    """When each rank finishes."""
    actions = order(schedule, pipeline, virtual, micro_batches)
    finish = finished(times, actions)
    return tuple([finish[number] for number in actions.last])


def finished(times: Times, actions: ActionOrder) -> list[float]:
    """When each action finishes."""
    durations, delays, blocked = times.by_slot(), _delays(times.send, times), _delays(times.receive, times)
    finish = [0.0]
    for slot, previous, after in actions.steps:
        start, arrival = finish[previous] + blocked[slot], finish[after] + delays[slot]
        finish.append((arrival if arrival > start else start) + durations[slot])
    return finish


def critical_path(times: Times, actions: ActionOrder, finish: list[float], rank: int) -> CriticalPath:
    """The chain of actions that a rank ends with."""
    stages, delays, blocked = len(times.forward), _delays(times.send, times), _delays(times.receive, times)
    visits, number = [0] * (3 * stages), actions.last[rank]
    while number:
        slot, previous, after = actions.steps[number - 1]
        visits[slot] += 1
        number = after if finish[after] + delays[slot] > finish[previous] + blocked[slot] else previous
    return CriticalPath(rank, [visits[kind * stages : (kind + 1) * stages] for kind in range(3)])


def settled(times: Times, schedule: str, pipeline: int, virtual: int, micro_batches: int) -> tuple[float, ...]:
    """When each rank finishes; a long step is extrapolated from its first rounds.

    A pipeline soon becomes periodic: each further `pipeline` micro-batches take as long as the previous ones. The
    search relies on that. Reported plans are simulated completely.
    """
    if not is_extrapolated(schedule, pipeline, virtual, micro_batches):
        return simulated_ends(times, schedule, pipeline, virtual, micro_batches)
    # Rounds of other schedules have as many micro-batches as there are ranks, or nearly as many.
    few = SETTLED * pipeline + (micro_batches % pipeline if schedule == "1f1b" else 0)
    before = simulated_ends(times, schedule, pipeline, virtual, few - pipeline)
    after = simulated_ends(times, schedule, pipeline, virtual, few)
    more = (micro_batches - few) / pipeline
    return tuple(late + more * (late - early) for early, late in zip(before, after, strict=True))


def is_extrapolated(schedule: str, pipeline: int, virtual: int, micro_batches: int) -> bool:
    """Whether `settled` extrapolates a step."""
    is_long = micro_batches // pipeline > SETTLED + 1 and micro_batches * pipeline * virtual > SHORT
    return is_long and schedule != "gpipe"


def events(
    times: Times, schedule: str, pipeline: int, virtual: int, micro_batches: int
) -> list[tuple[int, str, int, int, float, float]]:
    """Every action with rank, kind, stage, micro-batch, start and end, for a timeline."""
    durations, delays, blocked = times.by_slot(), _delays(times.send, times), _delays(times.receive, times)
    stages = len(times.forward)
    names = list(KINDS)
    actions, finish = order(schedule, pipeline, virtual, micro_batches), [0.0]
    drawn = []
    for (slot, previous, after), (rank, micro_batch) in zip(actions.steps, actions.places, strict=True):
        start = max(finish[previous] + blocked[slot], finish[after] + delays[slot])
        end = start + durations[slot]
        finish.append(end)
        drawn.append((rank, names[slot // stages], slot % stages, micro_batch, start, end))
    return drawn


def _delays(between: tuple[float, ...], times: Times) -> list[float]:
    """Seconds that belong to the message that an action waits for, by slot; `between` has those of each stage pair."""
    between = between or (0.0,) * (len(times.forward) - 1)
    return [0.0, *between, *between, 0.0, *(0.0,) * len(times.weights)]


def _busy(times: Times, pipeline: int, micro_batches: int) -> list[float]:
    blocked = _delays(times.receive, times)
    each = [sum(all_) for all_ in zip(times.by_slot(), blocked, strict=True)]
    stages = len(times.forward)
    each = [sum(each[stage::stages]) for stage in range(stages)]
    return [micro_batches * sum(each[rank::pipeline]) for rank in range(pipeline)]


def at_least(
    passes: Sequence[tuple[float, float, float]],
    send: Sequence[float],
    receive: Sequence[float],
    pipeline: int,
    micro_batches: int,
) -> float:
    """A lower bound for any schedule: the work of a rank, and the path of the first and last micro-batch to it.

    `passes` has the forward pass, the backward pass and the weight gradients of each stage. Exact for gpipe and 1f1b if
    all stages are equal and sends take no time. If weight gradients are delayed, other ranks do not wait for the last
    work of a rank. A rank's first receive is part of the path to it.
    """
    blocked = (0.0, *receive, 0.0) if receive else (0.0,) * (len(passes) + 1)
    there = best = 0.0
    late = passes[0][2] > 0 or passes[-1][2] > 0 or any(weights for _, _, weights in passes)
    totals = [forward + backward + weights for forward, backward, weights in passes]
    if receive:
        totals = [total + blocked[stage] + blocked[stage + 1] for stage, total in enumerate(totals)]
    for rank in range(pipeline):
        busy = totals[rank] if pipeline == len(totals) else sum(totals[rank::pipeline])
        path = there + micro_batches * busy - blocked[rank]
        if path > best:
            best = path
        if rank < len(send):
            forward, backward, _ = passes[rank]
            there += forward + send[rank] + (0.0 if late else backward + send[rank])
    return best
