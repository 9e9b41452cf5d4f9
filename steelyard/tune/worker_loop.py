"""A worker of a study: runs trials until the budget is spent. A crash loses at most the running trial.

STUDY/tune.json      the parsed tune file, and the address of the study's database
STUDY/recipe.toml    the tuned recipe, as it was written
STUDY/study.db       the study, unless another database is used; study.lock: held while a worker chooses a trial
STUDY/trials/00007/  recipe.toml, log.txt, trial.json, and the run's folder
STUDY/best.toml      the best settings so far as a recipe (best.txt: as a command), updated with each better trial
STUDY/report.html
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from steelyard.core.console import console
from steelyard.core.errors import Interrupted, RuntimeFailure, UserError
from steelyard.launch import backends
from steelyard.tune import attempt, candidate, outcome, storage, study_folder, submitted_trial, trial_history
from steelyard.tune.best import write_best
from steelyard.tune.outcome import TrialEnd
from steelyard.tune.planner_prior import PlannerPrior
from steelyard.tune.spec import Tune
from steelyard.tune.study import Study, folder_of
from steelyard.tune.trial import RUN
from steelyard.tune.trial_output import LOG

SECONDS_TO_TELL = 0.05
CRASHES_AT_FIRST = 3  # after so many first trials that all crash, a study stops


def search(tune: Tune, folder: Path, storage_url: str | None = None, worker: int = 0) -> dict[str, Any]:
    """Run trials until the budget is spent, the space is exhausted, or an interruption. Returns a summary."""
    prepare(tune)
    study, file = opened(tune, folder, storage_url, worker)
    with storage.database_errors(file), _asked_to_end():
        study.begin()
        known = trial_history.ran(study.trials())
        if known:
            console.say(f"{folder}: continues after {trial_history.counted(len(known))}")
        try:
            why = _search(study, folder)
        except Interrupted:
            summary = write_best(study.tune, study.trials(), folder)
            saved = f"{trial_history.counted(summary['trials'])} saved"
            raise Interrupted(f"{saved} in {folder}; the same command continues the study") from None
        console.say(f"{folder}: done after {why}")
        return write_best(study.tune, study.trials(), folder)


def opened(tune: Tune, folder: Path, storage_url: str | None = None, worker: int = 0) -> tuple[Study, Path | None]:
    """Open the study of a folder, replaced by a new one if it has no results. Also returns its database file, if any.

    A process that starts several workers calls this first, so that no worker opens a study that another one replaces.
    """
    folder.mkdir(parents=True, exist_ok=True)
    url = storage.url_of(folder, storage_url or tune.storage)
    file = storage.own_file(url)
    if file is not None and not file.is_file() and (folder / study_folder.SETTINGS).is_file() and not worker:
        console.warn(f"{file} is missing: a new study starts, and its trials replace those in {folder}")
    with storage.database_errors(file):
        study = Study(tune, url, worker)
        study_folder.remember(tune, folder, url)
    return study, file


@contextlib.contextmanager
def _asked_to_end() -> Iterator[None]:
    """Treat a scheduler's SIGTERM like Ctrl-C: the running trial ends, and results are saved."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise Interrupted

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def prepare(tune: Tune) -> None:
    """Reject settings with which no trial could run."""
    if tune.recipe is None:
        return
    candidate.refuse_recipe(tune)
    PlannerPrior(tune)
    if tune.launch.on is not None:
        submitted_trial.site_of(tune, candidate.recipe_at(tune, {}, is_trial=True))
        program = backends.load(tune.launch.on).program
        if program is not None and shutil.which(program) is None:
            raise UserError(
                f"{program} is not installed here",
                hint="run the tuner on a login node of the cluster, or with --on mpi",
            )


def check_files(tune: Tune) -> None:
    """Check once that the trials' files can be opened. The planner checks memory for each point."""
    if tune.recipe is not None and tune.launch.on is not None:
        from steelyard.launch import preflight
        from steelyard.launch.submit import SubmitRequest

        recipe = candidate.recipe_at(tune, {}, is_trial=True)
        preflight.check_files(
            SubmitRequest(tune.launch.on, submitted_trial.site_of(tune, recipe)[1], recipe), Path(RUN)
        )


def _search(study: Study, folder: Path) -> str:
    while True:
        for number in study.fail_the_lost():
            what = "was aborted" if study.tune.launch.on is None else "was left without a worker"
            console.say(f"trial {number} {what}: its worker was killed; its point is tried again")
        if study.has_unregistered_worker():
            time.sleep(SECONDS_TO_TELL)  # A live worker registers at once.
            continue
        why = study.is_over()
        trial = study.next() if why is None else None
        if trial is None:
            for number in study.left_by_the_lost():
                submitted_trial.abandon(folder_of(folder, number) / RUN)
            if why is None:
                _refuse_nothing_to_run(study)
            _refuse_only_crashes(study, folder, at_least=1)
            return why or "every point that can run"
        if study.is_surplus(trial):
            study.end(trial, TrialEnd(outcome.SURPLUS, "the budget was spent in the meantime", 0.0), [])
            continue
        attempt.make(study, trial, folder)
        write_best(study.tune, study.trials(), folder)
        _refuse_only_crashes(study, folder)


def _refuse_only_crashes(study: Study, folder: Path, at_least: int = CRASHES_AT_FIRST) -> None:
    """Stop a study whose first trials all crashed."""
    ran = trial_history.ran(study.trials())
    if len(ran) >= at_least and all(trial_history.result_of(each) == outcome.CRASHED for each in ran):
        last = ran[-1]
        which = "the only trial crashed" if len(ran) == 1 else f"the first {len(ran)} trials all crashed, the last"
        raise RuntimeFailure(
            f"{which} with: {trial_history.reported(last, 'reason')}",
            hint=f"see {folder_of(folder, last.number) / LOG}; the same command continues after a fix",
        )


def _refuse_nothing_to_run(study: Study) -> None:
    """Raise if no point of the space can run."""
    trials = study.trials()
    if any(trial_history.result_of(each) in (*outcome.RAN, "running", "waiting") for each in trials):
        return
    kinds = (outcome.PRUNED_BY_PLAN, outcome.BREAKS_CONSTRAINT)
    reasons = [
        trial_history.reported(each, "reason")
        for kind in kinds
        for each in trials
        if trial_history.result_of(each) == kind
    ]
    raise UserError(
        f"no point of the space can run: {(reasons or ['none satisfies the constraints'])[0]}",
        hint="widen [space], or relax constraints",
    )
