"""The charts of a study's report: history, importances, parallel coordinates, predicted and measured, Pareto front."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from steelyard.core import secrets
from steelyard.core.pages import charts
from steelyard.core.pages.charts import ChartAxis, Line
from steelyard.tune import outcome, trial_history
from steelyard.tune.objective import Objective
from steelyard.tune.spec import Tune

if TYPE_CHECKING:
    from optuna.study import Study
    from optuna.trial import FrozenTrial

FEWEST = 10  # finished trials needed for importances: fewer say more about chance than about a setting
SCRIPTS = (*charts.SCRIPTS, "coordinates.js")
BEST = 2  # index of its colour


def all_of(tune: Tune, study: Study, trials: Sequence[FrozenTrial]) -> list[str]:
    """All charts that the study has data for, as HTML."""
    done = [trial for trial in trials if trial_history.result_of(trial) == outcome.FINISHED]
    drawn: list[tuple[str, str]] = []
    for index, objective in enumerate(tune.objectives):
        if not done:
            break
        drawn.append((f"History of {objective.label}", _history(objective, index, trials)))
        importances = _importances(study, index) if len(done) >= FEWEST else {}
        if len(done) < FEWEST:
            few = f"<p>Needs {FEWEST} finished trials; {len(done)} {'has' if len(done) == 1 else 'have'} finished.</p>"
            drawn.append((f"Importance for {objective.label}", few))
        if importances:
            drawn.append((f"Importance for {objective.label}", _shares(importances)))
        drawn.append((f"Parallel coordinates, {objective.label}", _coordinates(tune, objective, index, done)))
        compared = _compared(objective, index, done)
        if compared is not None:
            drawn.append((f"Predicted and measured {objective.label}", compared))
    if len(tune.objectives) > 1 and done:
        drawn.append(("Trade-off of the objectives", _against(tune, done)))
    return [f"<h2>{html.escape(title)}</h2>{chart}" for title, chart in drawn]


def _history(objective: Objective, index: int, trials: Sequence[FrozenTrial]) -> str:
    best: list[tuple[int, float]] = []
    shown: dict[str, list[tuple[int, float, str]]] = {}
    for trial in trial_history.ran(trials):
        values = trial.values or trial_history.reported(trial, "values") or []
        value = values[index] if index < len(values) else None
        name = trial_history.result_of(trial)
        if value is not None:
            shown.setdefault(name, []).append((trial.number, value, _settings(trial)))
        if name == outcome.FINISHED and value is not None:
            if best:  # A step function: the best so far holds until a trial is better.
                best.append((trial.number, best[-1][1]))
            if not best or objective.better(value, best[-1][1]):
                best.append((trial.number, value))
    lines = []
    for number, (name, points) in enumerate(sorted(shown.items(), key=lambda item: item[0] != outcome.FINISHED)):
        numbers, heights, texts = zip(*points, strict=True)
        colour = number + (number >= BEST)
        lines.append(Line(name.replace("_", " "), numbers, heights, colour=colour, marks="only", texts=texts))
    if best:
        numbers, heights = zip(*best, strict=True)
        lines.append(Line("best so far", numbers, heights, colour=BEST))
    return charts.lines(lines, "trial", objective.label, points=True)


def _importances(study: Study, index: int) -> dict[str, float]:
    """Share of the difference among good trials that each setting explains; empty if trials are too similar."""
    from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances

    try:
        return get_param_importances(
            study, evaluator=PedAnovaImportanceEvaluator(), target=lambda trial: float(trial.values[index])
        )
    except (ValueError, RuntimeError, ZeroDivisionError):
        return {}


def _shares(importances: dict[str, float]) -> str:
    rows = (
        f"<tr><td>{html.escape(name)}</td><td class='number'>{value:.2f}</td>"
        f"<td><span class='share' style='width:{360 * min(1.0, max(0.0, value)):.0f}px'></span></td></tr>"
        for name, value in sorted(importances.items(), key=lambda item: -item[1])
    )
    return f"<table>{''.join(rows)}</table>"


def _coordinates(tune: Tune, objective: Objective, index: int, done: Sequence[FrozenTrial]) -> str:
    axes = [_axis(name, tune, done) for name in tune.space]
    axes.append(ChartAxis(objective.label, [trial.values[index] for trial in done]))
    names = [f"trial {trial.number}" for trial in done]
    return charts.coordinates(axes, names, less=objective.direction != "maximize")


def _axis(name: str, tune: Tune, done: Sequence[FrozenTrial]) -> ChartAxis:
    dimension = tune.space[name]
    if dimension.choice is not None:
        places = {repr(value): number for number, value in enumerate(dimension.choice)}
        marks = [(float(number), secrets.scrub(str(value))) for number, value in enumerate(dimension.choice)]
        indices = [places.get(repr(trial.params[name]), 0) for trial in done]
        return ChartAxis(name, indices, marks, [marks[index][1] for index in indices])
    numbers = [float(trial.params[name]) for trial in done]
    if not dimension.log:
        return ChartAxis(name, numbers)
    low, high = math.log10(float(dimension.low or 1)), math.log10(float(dimension.high or 1))
    marks = [(mark, f"{10**mark:.2g}") for mark in (low, (low + high) / 2, high)]
    return ChartAxis(name, [math.log10(number) for number in numbers], marks, [f"{number:.4g}" for number in numbers])


def _compared(objective: Objective, index: int, done: Sequence[FrozenTrial]) -> str | None:
    """Predicted and measured values, with a diagonal; None if the planner does not predict the metric."""
    points = [
        (
            trial.user_attrs["predicted"][objective.metric],
            trial.values[index],
            f"trial {trial.number} {_settings(trial)}",
        )
        for trial in done
        if objective.metric in (trial.user_attrs.get("predicted") or {})
    ]
    if not points:
        return None
    predicted, measured, texts = zip(*points, strict=True)
    ends = [min(*predicted, *measured), max(*predicted, *measured)]
    lines = [
        Line("trials", predicted, measured, marks="only", texts=texts),
        Line("as predicted", ends, ends, colour=1, dash="dot"),
    ]
    return charts.lines(lines, "predicted", "measured", points=True)


def _against(tune: Tune, done: Sequence[FrozenTrial]) -> str:
    first, second = tune.objectives[:2]
    texts = [f"trial {trial.number} {_settings(trial)}" for trial in done]
    x, y = ([trial.values[place] for trial in done] for place in (0, 1))
    line = Line("trials", x, y, marks="only", texts=texts)
    return charts.lines([line], first.label, second.label, points=True)


def _settings(trial: FrozenTrial) -> str:
    return secrets.scrub("\n".join(f"{name} = {value}" for name, value in trial.params.items()))
