"""One trial: its folder, its run and its result."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steelyard.core import files, secrets, units
from steelyard.core.console import console
from steelyard.core.errors import Interrupted, RuntimeFailure, UserError
from steelyard.tune import candidate, local_trial, outcome, submitted_trial, trial
from steelyard.tune.objective import ObjectiveValues
from steelyard.tune.outcome import TrialEnd
from steelyard.tune.spec import Tune
from steelyard.tune.study import RETRIES, Study, folder_of
from steelyard.tune.trial import RUN, TrialLimits
from steelyard.tune.trial_output import LOG, TrialLog

if TYPE_CHECKING:
    from optuna.trial import Trial


def make(study: Study, optuna_trial: Trial, folder: Path) -> None:
    """Run one trial, from creating its folder to recording its result."""
    tune, place, began = study.tune, folder_of(folder, optuna_trial.number), time.monotonic()
    measured = [ObjectiveValues(objective) for objective in tune.objectives]
    retries = int(optuna_trial.user_attrs.get("retries", 0))
    words = candidate.prepare(tune, optuna_trial.params, place, optuna_trial.number)
    limits = TrialLimits(60 * tune.trial.timeout_minutes, 60 * tune.trial.hang_minutes, began + study.seconds_left())
    beats = iter(range(1, 1 << 62))
    watching = (measured, limits, study.behind(measured), lambda: optuna_trial.set_user_attr("beat", next(beats)))
    try:
        if tune.launch.on is None:
            ended = local_trial.run(words, place, *watching)
        else:
            ended = _elsewhere(tune, optuna_trial, folder, *watching)
    except (Interrupted, RuntimeFailure) as error:
        why = "interrupted" if isinstance(error, Interrupted) else error.message
        study.end(optuna_trial, TrialEnd(outcome.INTERRUPTED, why, time.monotonic() - began), [])
        study.again(optuna_trial, retries)
        raise
    if ended.outcome == outcome.LOST and retries >= RETRIES:
        ended = TrialEnd(outcome.CRASHED, f"{ended.reason}, again", ended.seconds)
    if ended.outcome == outcome.LOST:
        study.again(optuna_trial, retries + 1)
    if ended.outcome == outcome.CUT_SHORT:  # No result for the point; it is first in the queue if the budget is raised.
        study.again(optuna_trial, retries)
    ended = _with_numbers(ended, measured)
    study.end(optuna_trial, ended, measured)
    values = {each.objective.label: each.value for each in measured}
    record = {
        "number": optuna_trial.number,
        "settings": optuna_trial.params,
        "outcome": ended.outcome,
        "reason": ended.reason,
    }
    record |= {"values": values, "seconds": ended.seconds, "predicted": optuna_trial.user_attrs.get("predicted")}
    files.write_json(place / "trial.json", secrets.redact(record) | {"command": shlex.join(secrets.redact(words))})
    console.say(_line(optuna_trial.number, optuna_trial.params, ended, measured))


def _elsewhere(
    tune: Tune,
    optuna_trial: Trial,
    folder: Path,
    measured: list[ObjectiveValues],
    limits: TrialLimits,
    is_behind: Callable[[], str | None],
    beat: Callable[[], None],
) -> TrialEnd:
    """Submit a trial and follow it, or adopt the job that a killed worker submitted for the same point."""
    place = folder_of(folder, optuna_trial.number)
    before = optuna_trial.user_attrs.get("takes_up")
    left = None if before is None else folder_of(folder, int(before)) / RUN
    if left is not None and submitted_trial.can_be_taken_up(left):
        console.say(f"trial {optuna_trial.number} adopts the running job of trial {before}")
        (place / RUN).symlink_to(Path("..", left.parent.name, RUN))
    else:
        recipe = candidate.recipe_at(tune, optuna_trial.params, is_trial=True)
        try:
            submitted_trial.start(submitted_trial.request(tune, recipe, place / RUN, optuna_trial.number))
        except UserError as refusal:  # For example too few nodes: the next point may need fewer.
            files.write_text(place / LOG, secrets.scrub(refusal.message) + "\n")
            return TrialEnd(outcome.CRASHED, " ".join(refusal.message.split()), 0.0)
    log = TrialLog(place / LOG, measured)
    return trial.run(submitted_trial.SubmittedTrial(place / RUN, log), log, place, limits, is_behind, beat)


def _with_numbers(ended: TrialEnd, measured: list[ObjectiveValues]) -> TrialEnd:
    """A finished trial whose objective is not finite counts as crashed."""
    wrong = next((each.objective.label for each in measured if not _is_number(each.value)), None)
    if ended.outcome != outcome.FINISHED or wrong is None:
        return ended
    return TrialEnd(outcome.CRASHED, f"{wrong} is not finite", ended.seconds)


def _is_number(value: float | None) -> bool:
    return value is not None and abs(value) < float("inf")


def _line(number: int, point: dict[str, Any], ended: TrialEnd, measured: list[ObjectiveValues]) -> str:
    settings = "  ".join(f"{name}={_value(value)}" for name, value in point.items())
    reported = "  ".join(
        f"{each.objective.label} {each.value:.6g}" if each.value is not None else "" for each in measured
    ).strip()
    how = reported if ended.outcome == outcome.FINISHED else f"{ended.outcome.replace('_', ' ')}: {ended.reason}"
    return f"trial {number}  {settings}  {how}  ({units.duration(ended.seconds)})"


def _value(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
