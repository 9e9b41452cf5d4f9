"""Pipeline bubble and stage times of a run, measured and predicted.

The bubble is the share of time, from the first pass of a step to its last, in which a rank computes nothing, as the
mean over ranks. The measured bubble is reported with three others: (1) the schedule with stages of equal time, (2) the
schedule with the measured stage times and sends that take no time, and (3) the planner's prediction. The difference
between (1) and (2) is the cost of the partition. The difference between (2) and the measured bubble is the cost of
communication and of waiting for the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from steelyard.core.errors import UserError
from steelyard.core.recipe import Recipe
from steelyard.observe.spans import COMPUTE, Spans
from steelyard.planning import pipeline_sim
from steelyard.planning.cluster import Cluster
from steelyard.planning.layout import Layout, of_recipe
from steelyard.planning.pipeline_sim import Times
from steelyard.planning.predict import Predictor
from steelyard.planning.step import StepCost

MOST_EVENTS = 20_000  # that a timeline shows


@dataclass(frozen=True)
class StageBalance:
    """Mean seconds of a stage's passes for one micro-batch, measured and, if available, predicted."""

    stage: int
    forward: float
    backward: float
    predicted_forward: float | None = None
    predicted_backward: float | None = None


@dataclass(frozen=True)
class Balance:
    """The pipeline of a run, measured and predicted. Shares are fractions of 1."""

    step_seconds: float
    predicted_seconds: float | None
    bubble: float
    bubble_even: float | None
    bubble_stages: float | None
    predicted_bubble: float | None
    imbalance: float
    predicted_imbalance: float | None
    stages: list[StageBalance]
    parts: dict[int, dict[str, float]]
    """Seconds per step by pipeline rank and kind of span, as the mean over steps and over the ranks of that stage."""
    why_no_prediction: str | None

    def as_result(self) -> dict[str, Any]:
        """The numbers for `--json`."""
        return {
            "step_seconds": self.step_seconds, "predicted_step_seconds": self.predicted_seconds,
            "bubble": self.bubble, "bubble_of_even_stages": self.bubble_even,
            "bubble_of_measured_stages": self.bubble_stages, "predicted_bubble": self.predicted_bubble,
            "imbalance": self.imbalance, "predicted_imbalance": self.predicted_imbalance,
        }  # fmt: skip


def measure(spans: Spans, recipe: Recipe, world: int, cluster: Cluster | None) -> Balance:
    """Measure the timeline, and compare it with the planner's prediction."""
    place = pipeline_ranks(recipe, world)
    stages = _stages(spans)
    micro_batches = _micro_batches(spans)
    plan = (recipe.parallel.schedule, recipe.parallel.pipeline, recipe.parallel.virtual, micro_batches)
    is_whole = len(stages) == recipe.parallel.pipeline * recipe.parallel.virtual and micro_batches > 0
    forward, backward = [one.forward for one in stages], [one.backward for one in stages]
    even = [float(np.mean(forward + backward))] * len(stages) if stages else []
    predicted, why = _predict(recipe, world, cluster)
    times, seconds, predicted_bubble = predicted or (None, None, None)
    if times is not None:
        stages = [
            StageBalance(one.stage, one.forward, one.backward, times.forward[one.stage],
                  times.backward[one.stage] + times.weights[one.stage])
            for one in stages
            if one.stage < len(times.forward)
        ]  # fmt: skip
    return Balance(
        step_seconds=float(np.median(spans.length)) / 1e9,
        predicted_seconds=seconds,
        bubble=_bubble(spans),
        bubble_even=_simulated(even, even, plan) if is_whole else None,
        bubble_stages=_simulated(forward, backward, plan) if is_whole else None,
        predicted_bubble=predicted_bubble,
        imbalance=_imbalance([one + other for one, other in zip(forward, backward, strict=True)]),
        predicted_imbalance=None
        if times is None
        else _imbalance([sum(each) for each in zip(times.forward, times.backward, times.weights, strict=True)]),
        stages=stages,
        parts=_parts(spans, place),
        why_no_prediction=why,
    )


def pipeline_ranks(recipe: Recipe, world: int) -> dict[int, int]:
    """The pipeline rank of each rank."""
    each = max(1, world // recipe.parallel.pipeline)
    return {rank: min(rank // each, recipe.parallel.pipeline - 1) for rank in range(world)}


def _stages(spans: Spans) -> list[StageBalance]:
    """Mean seconds of each stage's passes; a split backward pass counts as one."""
    totals: dict[tuple[int, bool], list[float]] = {}
    number = {name: place for place, name in enumerate(spans.names)}
    kinds = {True: [number.get("forward", -1)], False: [number.get("backward", -1), number.get("weights", -1)]}
    for rank in spans.ranks:
        for ahead, names in kinds.items():
            chosen = np.isin(rank.name, names)
            for stage in np.unique(rank.stage[chosen]):
                here = chosen & (rank.stage == stage)
                total = totals.setdefault((int(stage), ahead), [0.0, 0])
                total[0] += float((rank.end[here] - rank.start[here]).sum()) / 1e9
                total[1] += len(np.unique(rank.step[here] << 32 | np.clip(rank.micro_batch[here], 0, None)))
    numbers = sorted({stage for stage, _ in totals if stage >= 0})

    def mean(stage: int, ahead: bool) -> float:
        seconds, count = totals.get((stage, ahead), (0.0, 0))
        return seconds / max(1, count)

    return [StageBalance(stage, mean(stage, True), mean(stage, False)) for stage in numbers]


def _micro_batches(spans: Spans) -> int:
    rank = spans.ranks[0]
    passes = rank.micro_batch[np.isin(rank.name, spans.lane(COMPUTE))]
    return int(passes.max()) + 1 if len(passes) else 0


def _bubble(spans: Spans) -> float:
    """Share of the time from the first to the last pass in which ranks did not compute."""
    count, passes = len(spans.steps), spans.lane(COMPUTE)
    first, last = np.full(count, np.iinfo(np.int64).max), np.full(count, np.iinfo(np.int64).min)
    for rank in spans.ranks:
        chosen = np.isin(rank.name, passes)
        place = np.searchsorted(spans.steps, rank.step[chosen])
        np.minimum.at(first, place, rank.start[chosen])
        np.maximum.at(last, place, rank.end[chosen])
    window = np.clip((last - first).astype(np.float64), 1, None)
    busy = spans.sums[:, :, passes].sum(axis=2).mean(axis=1)
    return float(np.median(1 - busy / window)) if passes else 0.0


def _simulated(forward: list[float], backward: list[float], plan: tuple[str, int, int, int]) -> float | None:
    """The bubble of a schedule with these stage times, and sends that take no time."""
    count = len(forward)
    split = plan[0] == "zero-bubble" and plan[1] > 1
    halves = tuple(value / 2 if split else value for value in backward)
    times = Times(tuple(forward), halves, halves if split else (0.0,) * count, (0.0,) * max(0, count - 1))
    return _bubble_of(times, plan)


def _bubble_of(times: Times, plan: tuple[str, int, int, int]) -> float | None:
    try:
        table = pipeline_sim.simulate(times, *plan)
    except (AssertionError, ValueError):  # A truncated timeline gives numbers that the schedule does not allow.
        return None
    return float(1 - np.mean(table.busy) / table.makespan) if table.makespan else None


def _imbalance(seconds: list[float]) -> float:
    """How much longer the slowest stage takes than the mean, as a fraction."""
    mean = float(np.mean(seconds)) if seconds else 0.0
    return max(seconds) / mean - 1 if mean else 0.0


def _parts(spans: Spans, place: dict[int, int]) -> dict[int, dict[str, float]]:
    means = spans.sums.mean(axis=0) / 1e9
    parts: dict[int, dict[str, float]] = {}
    for at in sorted({place.get(rank.rank, 0) for rank in spans.ranks}):
        here = [number for number, rank in enumerate(spans.ranks) if place.get(rank.rank, 0) == at]
        parts[at] = {name: float(means[here, number].mean()) for number, name in enumerate(spans.names)}
    return parts


def predicted_events(
    recipe: Recipe, world: int, cluster: Cluster | None
) -> tuple[list[tuple[int, str, int, int, float, float]], str | None]:
    """Every predicted pass of a step (`pipeline_sim.events`), or the reason why there are none."""
    step, layout, why = _step(recipe, world, cluster)
    if step is None or layout is None:
        return [], why
    schedule, pipeline, virtual, micro_batches = step.plan
    if pipeline * virtual * micro_batches > MOST_EVENTS:
        return [], "the predicted step has too many passes to draw"
    return pipeline_sim.events(step.times(layout.partition), schedule, pipeline, virtual, micro_batches), None


def _predict(
    recipe: Recipe, world: int, cluster: Cluster | None
) -> tuple[tuple[Times, float, float | None] | None, str | None]:
    """The planner's stage times, step seconds and bubble, or the reason why there is no prediction."""
    step, layout, why = _step(recipe, world, cluster)
    if step is None or layout is None:
        return None, why
    times = step.times(layout.partition)
    return (times, step.seconds(layout.partition), _bubble_of(times, step.plan)), None


def _step(recipe: Recipe, world: int, cluster: Cluster | None) -> tuple[StepCost | None, Layout | None, str | None]:
    """The planner's cost of a step and its layout, or the reason why there is no prediction."""
    if cluster is None:
        return None, None, "the device is not in the catalogue; describe it with --cluster FILE"
    try:
        settings = recipe.settings()
        settings["parallel"] = settings.get("parallel", {}) | {"data": recipe.parallel.data_for(world)}
        fixed = type(recipe).model_validate(settings)
        layout = of_recipe(fixed, cluster)
        step = Predictor.of_layout(fixed, cluster, layout).step(layout)
        step.times(layout.partition)
        return step, layout, None
    except (UserError, ValueError) as error:
        return None, None, str(getattr(error, "message", error))
