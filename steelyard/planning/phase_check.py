"""The phases of a step, predicted and measured: which term of a prediction is off, and by how much.

forward, backward        passes of the rank that waits least, with the tensor-parallel communication inside them
exposed communication    gradient reduction after the last pass, and waits that the schedule does not explain
bubble                   the schedule's idle time: with the measured times of all stages and sends that take no time
optimizer, data          the update; and the copy of the batch to the device, or the fixed overhead of a step

Spans of a timeline (`log.timeline`) give the measured ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from steelyard.core.recipe import Recipe
from steelyard.core.safe_parse import json_objects
from steelyard.planning import pipeline_sim
from steelyard.planning.pipeline_sim import Times
from steelyard.planning.step import StepCost

PHASES = ("forward", "backward", "exposed communication", "bubble", "optimizer", "data")
FORWARD, BACKWARD = ("forward",), ("backward", "weights")
WAITS, REDUCTIONS = ("receive", "send", "wait"), ("gradients", "reduce")


class Phase(NamedTuple):
    """Seconds per step, predicted and measured; not measured without a timeline."""

    predicted: float
    measured: float | None

    @property
    def difference(self) -> float:
        """Seconds that the prediction is too short."""
        return 0.0 if self.measured is None else self.measured - self.predicted


def compare(step: StepCost, partition: tuple[int, ...], recipe: Recipe, folder: Path) -> dict[str, Phase]:
    """Each phase of a step. `folder` has the timeline, if there is one."""
    predicted, measured = predicted_phases(step, partition), _measured(recipe, folder, step)
    return {name: Phase(predicted[name], None if measured is None else measured[name]) for name in PHASES}


def worst(phases: dict[str, Phase]) -> str | None:
    """The phase whose prediction is off by the most seconds; None without a timeline."""
    known = [name for name, phase in phases.items() if phase.measured is not None]
    return max(known, key=lambda name: abs(phases[name].difference), default=None)


def predicted_phases(step: StepCost, partition: tuple[int, ...]) -> dict[str, float]:
    """Predicted seconds of the phases; they sum to the predicted step."""
    parts, times, table = step.parts(partition), step.times(partition), step.table
    passes = parts.compute + parts.tensor + parts.expert

    def seconds(rank: int) -> tuple[float, float]:
        stages = range(rank, len(partition), table.pipeline)
        ahead = sum(times.forward[stage] for stage in stages)
        return ahead, sum(times.backward[stage] + times.weights[stage] for stage in stages)

    ahead, back = min(
        map(seconds, range(table.pipeline)), key=lambda both: abs(sum(both) * table.micro_batches - passes)
    )
    share = ahead / (ahead + back) if ahead + back else 0.0
    return {
        "forward": passes * share,
        "backward": passes * (1 - share),
        "exposed communication": parts.pipeline + parts.gradient,
        "bubble": parts.bubble,
        "optimizer": parts.optimizer,
        "data": parts.overhead,
    }


@dataclass
class _Rank:
    """Seconds of a rank per step by span, and of one micro-batch by stage and pass."""

    spans: dict[str, float]
    stages: dict[tuple[int, bool], float]


def _measured(recipe: Recipe, folder: Path, step: StepCost) -> dict[str, float] | None:
    ranks = [rank for path in sorted(folder.glob("rank-*.jsonl")) if (rank := _rank(path)) is not None]
    if not ranks:
        return None
    own = min(ranks, key=lambda rank: rank.spans.get("receive", 0.0)).spans

    def total(names: tuple[str, ...]) -> float:
        return sum(own.get(name, 0.0) for name in names)

    waits = total(WAITS)
    bubble = min(waits, _bubble(ranks, recipe, step))
    return {
        "forward": total(FORWARD),
        "backward": total(BACKWARD),
        "exposed communication": total(REDUCTIONS) + waits - bubble,
        "bubble": bubble,
        "optimizer": total(("optimizer", "update")),
        "data": total(("data",)),
    }


def _bubble(ranks: list[_Rank], recipe: Recipe, step: StepCost) -> float:
    """Idle seconds per step of the slowest rank if stages take their measured times and sends take none."""
    stages = recipe.parallel.stages
    if recipe.parallel.pipeline == 1:
        return 0.0
    passes: list[list[float]] = [[], []]
    for stage in range(stages):
        for column, ahead in zip(passes, (True, False), strict=True):
            found = [rank.stages[stage, ahead] for rank in ranks if (stage, ahead) in rank.stages]
            column.append(sum(found) / len(found) if found else 0.0)
    splits = recipe.parallel.schedule == "zero-bubble"
    back = tuple(each / 2 if splits else each for each in passes[1])
    times = Times(tuple(passes[0]), back, back if splits else (0.0,) * stages, (0.0,) * (stages - 1))
    table = pipeline_sim.simulate(times, *step.plan)
    slowest = max(range(len(table.busy)), key=lambda rank: table.busy[rank])
    return float(max(0.0, table.makespan - table.busy[slowest]))


def _rank(path: Path) -> _Rank | None:
    spans: dict[str, float] = {}
    stages: dict[tuple[int, bool], float] = {}
    passes: dict[tuple[int, bool], set[tuple[int, int]]] = {}
    steps = set()
    for entry in _entries(path):
        seconds = (entry["end_ns"] - entry["start_ns"]) / 1e9
        steps.add(entry["step"])
        spans[entry["name"]] = spans.get(entry["name"], 0.0) + seconds
        if entry["name"] in FORWARD + BACKWARD:
            key = entry["stage"], entry["name"] in FORWARD
            stages[key] = stages.get(key, 0.0) + seconds
            passes.setdefault(key, set()).add((entry["step"], entry["micro_batch"]))
    if not steps:
        return None
    return _Rank(
        {name: total / len(steps) for name, total in spans.items()},
        {key: total / len(passes[key]) for key, total in stages.items()},
    )


def _entries(path: Path) -> Iterator[dict[str, Any]]:
    return json_objects(path.read_text(encoding="utf-8").splitlines())
