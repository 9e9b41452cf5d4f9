"""The charts of a study's report: history, importances, parallel coordinates, predicted against measured, frontier."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from steelyard.tune import history, outcome
from steelyard.tune.objective import Objective
from steelyard.tune.spec import Tune

if TYPE_CHECKING:
    from optuna.study import Study
    from optuna.trial import FrozenTrial

FEWEST = 4  # finished trials, before importances say anything


def all_of(tune: Tune, study: Study, trials: Sequence[FrozenTrial]) -> list[str]:
    """Every chart that the study has numbers for, as HTML; the first carries the plotting library."""
    done = [trial for trial in trials if history.result_of(trial) == outcome.FINISHED]
    figures: list[tuple[str, Any]] = []
    for index, objective in enumerate(tune.objectives):
        if not done:
            break
        figures.append((f"History of {objective.label}", _history(objective, index, trials)))
        importances = _importances(study, index) if len(done) >= FEWEST else {}
        if importances:
            figures.append((f"Importance for {objective.label}", _bars(importances)))
        figures.append((f"Parallel coordinates, {objective.label}", _coordinates(tune, objective, index, done)))
        compared = _compared(objective, index, done)
        if compared is not None:
            figures.append((f"Predicted against measured {objective.label}", compared))
    if len(tune.objectives) > 1 and done:
        figures.append(("Objectives against each other", _against(tune, done)))
    return [_page(title, figure, is_first=number == 0) for number, (title, figure) in enumerate(figures)]


def _page(title: str, figure: Any, is_first: bool) -> str:
    figure.update_layout(height=360, margin={"l": 60, "r": 40, "t": 50, "b": 45}, template="plotly_white")
    chart = figure.to_html(full_html=False, include_plotlyjs=is_first, config={"displaylogo": False})
    return f"<h2>{html.escape(title)}</h2>{chart}"


def _figure() -> Any:
    from plotly import graph_objects

    return graph_objects.Figure()


def _history(objective: Objective, index: int, trials: Sequence[FrozenTrial]) -> Any:
    figure = _figure()
    best: list[tuple[int, float]] = []
    shown: dict[str, list[tuple[int, float, str]]] = {}
    for trial in history.ran(trials):
        values = trial.values or history.told(trial, "values") or []
        value = values[index] if index < len(values) else None
        name = history.result_of(trial)
        if value is not None:
            shown.setdefault(name, []).append((trial.number, value, _settings(trial)))
        if name == outcome.FINISHED and value is not None:
            if not best or objective.better(value, best[-1][1]):
                best.append((trial.number, value))
            else:
                best.append((trial.number, best[-1][1]))
    for name, points in shown.items():
        numbers, values, texts = zip(*points, strict=True)
        figure.add_scatter(x=numbers, y=values, text=texts, mode="markers", name=name.replace("_", " "))
    if best:
        numbers, values = zip(*best, strict=True)
        figure.add_scatter(x=numbers, y=values, mode="lines", name="best so far", line={"shape": "hv"})
    return figure.update_layout(xaxis_title="trial", yaxis_title=html.escape(objective.label))


def _importances(study: Study, index: int) -> dict[str, float]:
    """How much of the difference among good trials each setting explains; none where trials are too alike."""
    from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances

    try:
        return get_param_importances(
            study, evaluator=PedAnovaImportanceEvaluator(), target=lambda trial: float(trial.values[index])
        )
    except (ValueError, RuntimeError, ZeroDivisionError):
        return {}


def _bars(importances: dict[str, float]) -> Any:
    ordered = sorted(importances.items(), key=lambda item: item[1])
    names, values = [html.escape(name) for name, _ in ordered], [value for _, value in ordered]
    figure = _figure()
    figure.add_bar(x=values, y=names, orientation="h", text=[f"{value:.2f}" for value in values])
    return figure.update_yaxes(automargin=True)


def _coordinates(tune: Tune, objective: Objective, index: int, done: Sequence[FrozenTrial]) -> Any:
    values = [trial.values[index] for trial in done]
    axes = [_axis(name, tune, done) for name in tune.space]
    axes.append({"label": html.escape(objective.label), "values": values})
    figure = _figure()
    is_more = objective.direction == "maximize"
    figure.add_parcoords(
        dimensions=axes, line={"color": values, "colorscale": "Blues", "showscale": True, "reversescale": not is_more}
    )
    return figure


def _axis(name: str, tune: Tune, done: Sequence[FrozenTrial]) -> dict[str, Any]:
    dimension, label = tune.space[name], html.escape(name)
    if dimension.choice is not None:
        places = {repr(value): number for number, value in enumerate(dimension.choice)}
        words = [html.escape(str(value)) for value in dimension.choice]
        found = [places.get(repr(trial.params[name]), 0) for trial in done]
        return {"label": label, "values": found, "tickvals": list(range(len(words))), "ticktext": words}
    numbers = [float(trial.params[name]) for trial in done]
    if not dimension.log:
        return {"label": label, "values": numbers}
    low, high = math.log10(float(dimension.low or 1)), math.log10(float(dimension.high or 1))
    marks = [low, (low + high) / 2, high]
    found_logs = [math.log10(number) for number in numbers]
    return {"label": label, "values": found_logs, "tickvals": marks, "ticktext": [f"{10**mark:.2g}" for mark in marks]}


def _compared(objective: Objective, index: int, done: Sequence[FrozenTrial]) -> Any | None:
    """Predicted and measured, with a line where they agree; None where the planner predicts nothing of the kind."""
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
    figure = _figure()
    figure.add_scatter(x=predicted, y=measured, text=texts, mode="markers", name="trials")
    ends = [min(*predicted, *measured), max(*predicted, *measured)]
    figure.add_scatter(x=ends, y=ends, mode="lines", name="as predicted", line={"dash": "dot"})
    return figure.update_layout(xaxis_title="predicted", yaxis_title="measured")


def _against(tune: Tune, done: Sequence[FrozenTrial]) -> Any:
    first, second = tune.objectives[:2]
    figure = _figure()
    figure.add_scatter(
        x=[trial.values[0] for trial in done], y=[trial.values[1] for trial in done], mode="markers",
        text=[f"trial {trial.number} {_settings(trial)}" for trial in done], name="trials",
    )  # fmt: skip
    return figure.update_layout(xaxis_title=html.escape(first.label), yaxis_title=html.escape(second.label))


def _settings(trial: FrozenTrial) -> str:
    return html.escape(", ".join(f"{name}={value}" for name, value in trial.params.items()))
