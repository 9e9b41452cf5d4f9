"""One attempt at a point: its folder, the run, and what is learned from it."""

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


def make(study: Study, asked: Trial, folder: Path) -> None:
    """One trial, from its folder to what is learned from it."""
    tune, place, began = study.tune, folder_of(folder, asked.number), time.monotonic()
    measured = [ObjectiveValues(objective) for objective in tune.objectives]
    retries = int(asked.user_attrs.get("retries", 0))
    words = candidate.prepare(tune, asked.params, place, asked.number)
    limits = TrialLimits(60 * tune.trial.timeout_minutes, 60 * tune.trial.hang_minutes, began + study.seconds_left())
    beats = iter(range(1, 1 << 62))
    watching = (measured, limits, study.behind(measured), lambda: asked.set_user_attr("beat", next(beats)))
    try:
        if tune.launch.on is None:
            ended = local_trial.run(words, place, *watching)
        else:
            ended = _elsewhere(tune, asked, folder, *watching)
    except (Interrupted, RuntimeFailure) as error:
        why = "interrupted" if isinstance(error, Interrupted) else error.message
        study.end(asked, TrialEnd(outcome.INTERRUPTED, why, time.monotonic() - began), [])
        study.again(asked, retries)
        raise
    if ended.outcome == outcome.LOST and retries >= RETRIES:
        ended = TrialEnd(outcome.CRASHED, f"{ended.reason}, as before", ended.seconds)
    if ended.outcome == outcome.LOST:
        study.again(asked, retries + 1)
    if ended.outcome == outcome.CUT_SHORT:  # It says nothing about the point, which is first when more hours are given.
        study.again(asked, retries)
    ended = _with_numbers(ended, measured)
    study.end(asked, ended, measured)
    values = {each.objective.label: each.value for each in measured}
    record = {"number": asked.number, "settings": asked.params, "outcome": ended.outcome, "reason": ended.reason}
    record |= {"values": values, "seconds": ended.seconds, "predicted": asked.user_attrs.get("predicted")}
    files.write_json(place / "trial.json", secrets.redact(record) | {"command": shlex.join(secrets.redact(words))})
    console.say(_line(asked.number, asked.params, ended, measured))


def _elsewhere(
    tune: Tune,
    asked: Trial,
    folder: Path,
    measured: list[ObjectiveValues],
    limits: TrialLimits,
    is_behind: Callable[[], str | None],
    beat: Callable[[], None],
) -> TrialEnd:
    """Submit a trial and follow it, or take up the job that a killed worker left behind for the same point."""
    place = folder_of(folder, asked.number)
    before = asked.user_attrs.get("takes_up")
    left = None if before is None else folder_of(folder, int(before)) / RUN
    if left is not None and submitted_trial.can_be_taken_up(left):
        console.say(f"trial {asked.number} takes up what trial {before} left running")
        (place / RUN).symlink_to(Path("..", left.parent.name, RUN))
    else:
        recipe = candidate.recipe_at(tune, asked.params, is_trial=True)
        try:
            submitted_trial.start(submitted_trial.request(tune, recipe, place / RUN, asked.number))
        except UserError as refusal:  # More nodes than there are, say: the next point may ask for fewer.
            files.write_text(place / LOG, secrets.scrub(refusal.message) + "\n")
            return TrialEnd(outcome.CRASHED, " ".join(refusal.message.split()), 0.0)
    log = TrialLog(place / LOG, measured)
    return trial.run(submitted_trial.Submitted(place / RUN, log), log, place, limits, is_behind, beat)


def _with_numbers(ended: TrialEnd, measured: list[ObjectiveValues]) -> TrialEnd:
    """A trial that ended well with a loss that is no number did not."""
    wrong = next((each.objective.label for each in measured if not _is_number(each.value)), None)
    if ended.outcome != outcome.FINISHED or wrong is None:
        return ended
    return TrialEnd(outcome.CRASHED, f"{wrong} is no number", ended.seconds)


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
