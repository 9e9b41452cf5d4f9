"""The report of a study as one HTML file that needs no network."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steelyard.core import files, secrets, units
from steelyard.core.pages import page
from steelyard.tune import candidate, outcome, storage, study_charts, study_folder, trial_history
from steelyard.tune.best import front, tied, ties
from steelyard.tune.objective import Objective
from steelyard.tune.spec import Tune

if TYPE_CHECKING:
    from optuna.study import Study
    from optuna.trial import FrozenTrial

UNLISTED = (outcome.REPEATED, outcome.BREAKS_CONSTRAINT)


def write(folder: Path, url: str | None = None, path: Path | None = None) -> Path:
    """Write the report of a study, finished or not, and return its path."""
    tune, study = study_folder.opened(folder, url)
    path = path or folder / "report.html"
    with storage.database_errors():
        files.write_text(path, render(tune, study))
    return path


def render(tune: Tune, study: Study) -> str:
    """The report as HTML. All text from the study is escaped."""
    trials = study.get_trials(deepcopy=False)
    best = front(tune, trials)
    body = [
        _rows(_summary(tune, trials)),
        *_best(tune, best, trials),
        *study_charts.all_of(tune, study, trials),
        "<h2>Trials</h2>",
        _trials(tune, trials),
    ]
    return page.page(tune.name, body, study_charts.SCRIPTS)


def _summary(tune: Tune, trials: Sequence[FrozenTrial]) -> list[tuple[str, str]]:
    reported = Counter(trial_history.result_of(trial) for trial in trials)
    seconds = sum(float(trial_history.reported(trial, "seconds", 0.0)) for trial in trials)
    objectives = "; ".join(f"{each.direction} {each.label} ({each.picked})" for each in tune.objectives)
    return [
        ("Tuned", secrets.scrub(tune.command or f"the recipe {tune.name}")),
        ("Objectives", objectives),
        ("Trials", f"{len(trial_history.ran(trials))}, {units.duration(seconds)} of runs"),
        ("Outcomes", ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in sorted(reported.items()))),
    ]


def _best(tune: Tune, best: Sequence[FrozenTrial], trials: Sequence[FrozenTrial]) -> list[str]:
    if not best:
        return ["<p>No trial has finished yet.</p>"]
    first = best[0]
    shown = ", ".join(f"{each.label} {value:.6g}" for each, value in zip(tune.objectives, first.values, strict=True))
    title = f"<h2>Best settings: trial {first.number}, {html.escape(shown)}</h2>"
    several = f"<p>{len(best)} trials are on the Pareto front; this one is the best in the first objective.</p>"
    whole = secrets.scrub(candidate.written(tune, first.params))
    what = "The full recipe (best.toml)" if tune.recipe is not None else "The full command (best.txt)"
    equal = ties(first, trials)
    remarks = [several if len(tune.objectives) > 1 else "", f"<p>{tied(equal)}.</p>" if equal else ""]
    return [title, *remarks, _rows(list(first.params.items())), page.folded(what, whole)]


def _trials(tune: Tune, trials: Sequence[FrozenTrial]) -> str:
    foreseen = [each for each in tune.objectives if any(_predicted(trial, each) is not None for trial in trials)]
    objectives = [name for each in tune.objectives for name in (each.label, *_compared_names(each, foreseen))]
    head = ["trial", *tune.space, *objectives, "outcome", "seconds", "reason"]
    rows = []
    unlisted = 0
    for trial in trials:
        if trial_history.result_of(trial) in UNLISTED:
            unlisted += 1
            continue
        values: Sequence[Any] = trial.values or trial_history.reported(trial, "values") or [None] * len(tune.objectives)
        cells = [
            trial.number,
            *(trial.params.get(name, "") for name in tune.space),
            *(cell for pair in zip(tune.objectives, values, strict=True) for cell in _measured(trial, *pair, foreseen)),
            trial_history.result_of(trial).replace("_", " "),
            trial_history.reported(trial, "seconds", ""),
            trial_history.reported(trial, "reason", ""),
        ]
        rows.append([_cell(cell) for cell in cells])
    remark = (
        f"<p>{unlisted} proposals are not listed: they repeat a point or violate a constraint.</p>" if unlisted else ""
    )
    return f"<div class='scroll'>{page.table(rows, head)}</div>{remark}"


def _predicted(trial: FrozenTrial, objective: Objective) -> float | None:
    """The planner's prediction of an objective, made before the trial ran."""
    return (trial.user_attrs.get("predicted") or {}).get(objective.metric)


def _compared_names(objective: Objective, foreseen: list[Objective]) -> list[str]:
    return [f"predicted {objective.label}", "measured / predicted"] if objective in foreseen else []


def _measured(trial: FrozenTrial, objective: Objective, value: Any, foreseen: list[Objective]) -> list[Any]:
    """The cells of an objective: measured and, if the planner predicts it, predicted and their ratio."""
    if objective not in foreseen:
        return [value]
    predicted = _predicted(trial, objective)
    ratio = f"{value / predicted:.2f}" if predicted and isinstance(value, int | float) else None
    return [value, predicted, ratio]


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return secrets.scrub(f"{value:.6g}" if isinstance(value, float) else str(value))


def _rows(rows: Sequence[tuple[str, Any]]) -> str:
    return page.pairs({key: _cell(value) for key, value in rows})
