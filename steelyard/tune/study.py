"""A study: chooses the next point, and records the results.

The sampler is created again for every point, from the seed, the worker's index and the number of finished points. A
study that was killed therefore continues with the same points.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steelyard.core import files, secrets
from steelyard.core.console import console
from steelyard.core.errors import UserError
from steelyard.core.recipe.load import written
from steelyard.core.recipe.toml import leaves
from steelyard.tune import outcome, storage, trial_history
from steelyard.tune.best import front
from steelyard.tune.objective import ObjectiveValues
from steelyard.tune.outcome import TrialEnd
from steelyard.tune.planner_prior import LOOKED_AT, PlannerPrior
from steelyard.tune.search_space import Point, key
from steelyard.tune.spec import Tune

if TYPE_CHECKING:
    from optuna.samplers import BaseSampler
    from optuna.trial import FrozenTrial, Trial

REJECTED_IN_A_ROW = 4  # of the sampler's points, before one of the remaining points is chosen
DRAWN = 2_000  # random points that are considered if the grid is too large
HEARTBEAT_TIMEOUT = 60.0  # without a heartbeat, before a worker on another host counts as dead
REGISTER_TIMEOUT = 30.0  # from the start of a trial, for its worker to register; seconds on a busy machine
LOCK = ".lock"
RETRIES = 1  # of a point whose worker died, since the point may have killed it


class Study:
    """The study of a tune file, in its database."""

    def __init__(self, tune: Tune, url: str, worker: int = 0) -> None:
        self.tune, self.worker, self.file = tune, worker, storage.own_file(url)
        self.space, self.prior = tune.searched(), PlannerPrior(tune)
        self.distributions = self.space.distributions()
        goals = [each.direction for each in tune.objectives]
        self.optuna = storage.open_study(url, tune.name, goals)
        self._beats: dict[int, tuple[Any, float]] = {}
        known = self._known()
        if worker == 0 and (known == {outcome.CRASHED} or (not known and self._changed())):
            storage.forget(self.optuna)
            self.optuna = storage.open_study(url, tune.name, goals)
            what = "only crashed trials" if known else "no results"
            console.say(f"the study {tune.name} has {what}: it starts again")
        self._check_unchanged()

    def _known(self) -> set[str]:
        """Outcomes of trials with results or possible results: running ones, and jobs that may be adopted."""
        idle = {*outcome.REJECTED, *outcome.VOID, "waiting"}
        left = {"left running"} if self.left_by_the_lost() else set()
        return {trial_history.result_of(trial) for trial in self.trials()} - idle | left

    def _changed(self) -> list[str]:
        """Differences between the settings that the study started with and the file, as text lines."""
        stored, mine = self.optuna.user_attrs.get("tune"), self._identity()
        if stored is None:
            return []
        changed = sorted(name for name in mine.keys() | stored.keys() if mine.get(name) != stored.get(name))
        return [f"  {name}: {_short(stored.get(name))} -> {_short(mine.get(name))}" for name in changed]

    def _identity(self) -> dict[str, Any]:
        """A study's recipe, space and objectives, without secrets."""
        whole = {} if self.tune.recipe is None else {"recipe": written(self.tune.recipe)}
        identity: dict[str, Any] = secrets.redact(json.loads(json.dumps(dict(leaves(self.tune.identity() | whole)))))
        return identity

    def _check_unchanged(self) -> None:
        """Reject a changed recipe, space or objective, with which trials would not be comparable."""
        if self.optuna.user_attrs.get("tune") is None:
            storage.persistently(lambda: self.optuna.set_user_attr("tune", self._identity()))
        elif changed := self._changed():
            raise UserError(
                f"the study {self.tune.name} was started with other settings:\n" + "\n".join(changed),
                hint="undo the change to continue it, or start another: --study DIR, and a name in a shared database",
            )

    def trials(self) -> list[FrozenTrial]:
        """All trials, by number."""
        return self.optuna.get_trials(deepcopy=False)

    def begin(self) -> None:
        """Queue the planner's first points, once for all workers."""
        if self.optuna.user_attrs.get("begun"):
            return
        if self.tune.sampler == "tpe":
            for point in self.prior.first(self.space, self.tune.budget.trials):
                self.optuna.enqueue_trial(point, user_attrs={"chosen_by": "plan"}, skip_if_exists=True)
        storage.persistently(lambda: self.optuna.set_user_attr("begun", True))

    def next(self) -> Trial | None:
        """The next trial to run; None if no point of the space is left."""
        with self._alone():
            return self._next()

    def _alone(self) -> contextlib.AbstractContextManager[object]:
        """No other worker changes the same trial: an SQLite file has no locks of rows for Optuna."""
        return contextlib.nullcontext() if self.file is None else files.locked(self.file.with_suffix(LOCK), wait=True)

    def _next(self) -> Trial | None:
        if self.tune.sampler == "grid":
            return self._next_left()
        for _ in range(REJECTED_IN_A_ROW):
            trial = self._ask()
            if self._is_accepted(trial):
                return trial
        return self._next_left()

    def _next_left(self) -> Trial | None:
        """The next queued or remaining point."""
        while True:
            if not any(trial.state.name == "WAITING" for trial in self.trials()):
                point = self._left()
                if point is None:
                    return None
                self.optuna.enqueue_trial(point, user_attrs={"chosen_by": "what is left"})
            trial = self._ask()
            if self._is_accepted(trial):
                return trial

    def _ask(self) -> Trial:
        from optuna.exceptions import UpdateFinishedTrialError

        while True:
            self.optuna.sampler = self._sampler(trial_history.settled(self.trials()))
            trial = self.optuna.ask(self.distributions)
            try:
                trial.set_user_attr("worker", trial_history.me())
            except UpdateFinishedTrialError:
                continue  # Another worker took this one for dead, and queued the point again.
            return trial

    def _sampler(self, settled: int) -> BaseSampler:
        from optuna.samplers import RandomSampler, TPESampler

        text = f"{self.tune.seed} {settled} {self.worker}"
        seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")
        if self.tune.sampler == "random":
            return RandomSampler(seed=seed)
        # Settings are sampled independently, as in all versions. The constant liar avoids points of running trials.
        trials = self.tune.budget.trials or 40
        return TPESampler(
            seed=seed, multivariate=False, constant_liar=True, n_startup_trials=max(4, min(10, trials // 4))
        )

    def _is_accepted(self, trial: Trial) -> bool:
        """Whether a point is to be run; if not, the trial ends with the reason."""
        trials = [each for each in self.trials() if each.number != trial.number]
        point, foreseen = trial.params, None
        broken, before = self.space.broken(point), trial_history.tried(trials).get(key(point))
        if broken is not None:
            ended = (outcome.BREAKS_CONSTRAINT, broken)
        elif before is not None:
            ended = (outcome.REPEATED, f"same point as trial {before}")
        else:
            foreseen = self.prior.of(point)
            ended = (outcome.PRUNED_BY_PLAN, foreseen.why_not or "")
        if foreseen is not None and foreseen.why_not is None:
            trial.set_user_attr("predicted", foreseen.predicted)
            return True
        self.end(trial, TrialEnd(*ended, 0.0), [])
        return False

    def _left(self) -> Point | None:
        """An untried point that may run: near the best or, every third time, by the planner's order or at random."""
        trials = self.trials()
        known = trial_history.tried(trials)
        chance = random.Random(f"{self.tune.seed} {trial_history.settled(trials)} {self.worker}")
        points = self.space.grid()
        if points is None:
            points = list(self.space.drawn(chance, DRAWN))
        points = [each for each in points if key(each) not in known]
        own = self.worker % max(1, len(points))  # Workers that choose at the same time choose different points.
        points = points[own:] + points[:own]
        if self.tune.sampler != "grid":
            chance.shuffle(points)
            best, turn = front(self.tune, trials), trial_history.settled(trials) % 3
            if best and turn:
                points.sort(key=lambda point: self.space.distance(point, best[0].params))
            elif self.tune.objectives[0].is_speed:
                points = self.prior.ordered(points[:LOOKED_AT]) or points
        return next((point for point in points if self.prior.of(point).why_not is None), None)

    def end(self, trial: Trial, ended: TrialEnd, measured: list[ObjectiveValues]) -> None:
        """Record how a trial ended, for the sampler and the reports."""
        from optuna.trial import TrialState

        reported = {"outcome": ended.outcome, "reason": ended.reason, "seconds": round(ended.seconds, 3)}
        reported["at"] = trial_history.now().isoformat()
        curves = {"values": [each.value for each in measured], "curves": [each.short_curve() for each in measured]}
        trial.set_user_attr("ended", reported | (curves if measured else {}))
        if ended.outcome == outcome.FINISHED:
            self.optuna.tell(trial, [float(each.value or 0.0) for each in measured])
            return
        if ended.outcome == outcome.STOPPED_EARLY and len(measured) == 1 and measured[0].curve:
            trial.report(measured[0].curve[-1][1], step=measured[0].curve[-1][0])
        # The sampler avoids pruned points, and ignores failed ones.
        failed = (outcome.CRASHED, outcome.REPEATED, *outcome.VOID)
        state = TrialState.FAIL if ended.outcome in failed else TrialState.PRUNED
        self.optuna.tell(trial, state=state)

    def again(self, trial: Trial | FrozenTrial, retries: int, takes_up: int | None = None) -> None:
        """Queue a trial's point again; `takes_up` is the trial whose job may be adopted."""
        attributes = {"retries": retries} | ({} if takes_up is None else {"takes_up": takes_up})
        self.optuna.enqueue_trial(trial.params, user_attrs=attributes)

    def left_by_the_lost(self) -> list[int]:
        """The lost trials whose jobs no worker has adopted, and none will when the study is over."""
        idle = ("waiting", outcome.REPEATED, outcome.SURPLUS, outcome.PRUNED_BY_PLAN)
        known: dict[bool, set[int]] = {True: set(), False: set()}
        for each in self.trials():
            if "takes_up" in each.user_attrs:
                known[trial_history.result_of(each) in idle].add(int(each.user_attrs["takes_up"]))
        return sorted(known[True] - known[False])

    def fail_the_lost(self) -> list[int]:
        """End the trials whose worker was killed, and queue their points again. Returns their numbers.

        The point may have killed its worker, so it is retried only `RETRIES` times. A submitted job runs elsewhere
        and cannot have killed it.
        """
        from optuna.trial import TrialState

        lost = []
        with self._alone():
            for trial in self.trials():
                if trial.state != TrialState.RUNNING or not self._is_lost(trial):
                    continue
                retries, is_elsewhere = int(trial.user_attrs.get("retries", 0)), self.tune.launch.on is not None
                reported = {"outcome": outcome.LOST, "reason": "its worker was killed"}
                if retries >= RETRIES and not is_elsewhere:
                    reported = {"outcome": outcome.CRASHED, "reason": "its worker was killed, again"}
                try:
                    self.optuna._storage.set_trial_user_attr(trial._trial_id, "ended", reported)
                    self.optuna.tell(trial.number, state=TrialState.FAIL)
                except (RuntimeError, ValueError):
                    continue  # Another worker was faster.
                lost.append(trial.number)
                if trial.params.keys() != self.space.dimensions.keys():
                    continue
                if is_elsewhere:
                    self.again(trial, retries, takes_up=trial.number)
                elif retries < RETRIES:
                    self.again(trial, retries + 1)
        return lost

    def has_unregistered_worker(self) -> bool:
        """Whether a trial was started by a worker that has not registered yet."""
        return any(trial.state.name == "RUNNING" and "worker" not in trial.user_attrs for trial in self.trials())

    def _is_lost(self, trial: FrozenTrial) -> bool:
        worker = trial.user_attrs.get("worker")
        if worker is not None and trial_history.is_dead(worker):
            return True
        beat, now = (worker, trial.user_attrs.get("beat")), time.monotonic()
        seen = self._beats.get(trial.number)
        if seen is None or seen[0] != beat:
            self._beats[trial.number] = (beat, now)
            return False
        if worker is None:
            return now - seen[1] > REGISTER_TIMEOUT
        return worker.get("host") != trial_history.me()["host"] and now - seen[1] > HEARTBEAT_TIMEOUT

    def is_over(self) -> str | None:
        """Why no further trial is started; None if there is budget left."""
        trials, budget = self.trials(), self.tune.budget
        if budget.trials is not None and trial_history.spent(trials) >= budget.trials:
            return trial_history.counted(budget.trials)
        if self.seconds_left() <= 0:
            return f"{budget.hours:g} hours"
        return None

    def seconds_left(self) -> float:
        """Remaining seconds of the study's hours."""
        hours = self.tune.budget.hours
        if hours is None:
            return float("inf")
        return 3600 * hours - trial_history.seconds_used(self.trials(), trial_history.now())

    def is_surplus(self, trial: Trial) -> bool:
        """Whether other workers have meanwhile started the last trials of the budget."""
        most = self.tune.budget.trials
        return most is not None and trial_history.spent([t for t in self.trials() if t.number < trial.number]) >= most

    def behind(self, measured: list[ObjectiveValues]) -> Callable[[], str | None]:
        """The early-stopping rule for a running trial, to be called repeatedly."""
        from steelyard.tune.pruner import TrialPruner

        return TrialPruner(self.tune, self.trials(), measured)


def folder_of(study: Path, number: int) -> Path:
    """The folder of a trial."""
    return study / "trials" / f"{number:05d}"


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 200 else text[:197] + "..."
