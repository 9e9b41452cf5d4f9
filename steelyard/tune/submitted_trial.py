"""A trial that was submitted to a backend, as `steelyard submit` does.

The tuner follows the run folder, like `steelyard watch`: its logs, its records and the scheduler's records. The job
survives a killed tuner; the next worker of the study adopts it.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from steelyard.core.console import console
from steelyard.core.errors import RuntimeFailure, SteelyardError, UserError
from steelyard.core.recipe import Recipe
from steelyard.core.recipe.site_section import SiteSection
from steelyard.launch import backends, job_spec, launch_record, sites
from steelyard.launch.backends import ENDED, WAITING, JobState
from steelyard.launch.launch_record import launched
from steelyard.launch.submit import SubmitRequest, cancel_run, groups_of, submit
from steelyard.tune import outcome
from steelyard.tune.command import STORAGE
from steelyard.tune.spec import Tune
from steelyard.tune.trial_output import TrialLog

FIRST_QUESTION, LAST_QUESTION = 0.5, 10.0  # seconds between polls of the scheduler, increasing with the age of the job
SECONDS_TO_CANCEL = 30.0  # before it is killed, and again before it is left running


def site_of(tune: Tune, recipe: Recipe) -> tuple[str | None, SiteSection]:
    """The site of a trial. Trials are not requeued, since the waiting time would be measured."""
    launch = tune.launch
    name, site = sites.find(launch.site, recipe.site, Path(launch.sites) if launch.sites else None)
    site = sites.changed(site, ",".join(launch.hosts) if launch.hosts else None, None)
    minutes = math.ceil(tune.trial.timeout_minutes)
    return name, backends.load(str(launch.on)).trial_site(site, minutes)


def request(tune: Tune, recipe: Recipe, run: Path, number: int = 0) -> SubmitRequest:
    """The submit request of a trial. Ranks and nodes follow from its layout."""
    launch = tune.launch
    name, site = site_of(tune, recipe)
    if tune.nproc is not None:
        data = recipe.parallel.data_for(tune.nproc)
        recipe = recipe.model_copy(update={"parallel": recipe.parallel.model_copy(update={"data": data})})
    backend = backends.load(str(launch.on))
    return SubmitRequest(
        on=str(launch.on),
        site=site,
        recipe=recipe,
        name=f"{tune.name}-{number:05d}",
        run=run,
        site_name=name,
        cluster=Path(tune.cluster) if tune.cluster else None,
        ranks_per_node=launch.ranks_per_node if backend.is_remote else None,
        time_limit=launch.time,
        skip_checks=True,
    )


def world_of(tune: Tune, recipe: Recipe) -> int:
    """Ranks of a trial; raises if there are not enough nodes for its layout."""
    if tune.launch.on is None:
        return tune.ranks or 1
    return job_spec.world(groups_of(request(tune, recipe, Path())))


def start(trial: SubmitRequest) -> Path:
    """Submit the trial and return its run folder. Jobs do not get the database URL, which may contain a password."""
    with _without(STORAGE):
        reported = submit(trial)
    ranks = f"{reported['ranks']} ranks" if reported["ranks"] > 1 else "one rank"
    console.say(f"{trial.name} is job {', '.join(reported['jobs'])}, {ranks}")
    return Path(reported["run"])


@contextlib.contextmanager
def _without(name: str) -> Iterator[None]:
    value = os.environ.pop(name, None)
    try:
        yield
    finally:
        if value is not None:
            os.environ[name] = value


class SubmittedTrial:
    """A job of a scheduler, followed through its run folder."""

    settling = 10.0

    def __init__(self, run: Path, log: TrialLog) -> None:
        self.run, self.log = run, log
        launch = launched(run)
        if launch is None:
            raise RuntimeFailure(f"{run} has no {launch_record.LAUNCH}")
        self._launch, self._began, self._asked = launch, time.monotonic(), -math.inf
        self._read: dict[Path, int] = {}
        self._now: list[dict[str, Any]] = []
        self._never: str | None = None
        self._ask()

    def look(self, seconds: float) -> bool:
        """Wait `seconds`, read new log data, and poll the scheduler if due."""
        time.sleep(seconds)
        now, before = time.monotonic(), self.state
        if now - self._asked > min(max((now - self._began) / 10, FIRST_QUESTION), LAST_QUESTION):
            self._ask()
        return self._take_logs() or self.state != before

    def _ask(self) -> None:
        self._asked = time.monotonic()
        self._now = launch_record.current(launch_record.refresh(self.run), self._launch)
        reasons = [str(each.get("reason") or "") for each in self._now if each.get("never")]
        self._never = self._never or next(iter(reasons), None)

    @property
    def state(self) -> JobState | None:
        """The last state that the backend reported."""
        return launch_record.state(self._now, self._launch)

    def _take_logs(self) -> bool:
        is_new = False
        for path in sorted((self.run / "logs").glob("*")):
            if path.suffix not in (".out", ".err", ".log"):
                continue
            try:
                with open(path, "rb") as file:
                    file.seek(self._read.get(path, 0))
                    data = file.read()
            except OSError:
                continue
            self._read[path] = self._read.get(path, 0) + len(data)
            if data:
                is_new = True
                self.log.feed(data, path.name)
        return is_new

    def is_waiting(self) -> bool:
        """Whether it is queued or suspended."""
        return self.state is None or self.state in WAITING

    def _is_live(self) -> bool:
        return self.state not in ENDED

    def is_over(self) -> bool:
        """Whether the job has ended or will never start."""
        return not self._is_live() or self._never is not None

    def stop(self) -> None:
        """Cancel the job, at first gracefully. If the scheduler does not answer, warn and continue."""
        try:
            self._cancel()
        except SteelyardError as error:
            console.warn(f"cannot cancel job {', '.join(self._launch.jobs)}: {error}")
        self._take_logs()

    def _cancel(self) -> None:
        for at_once in (False, True):
            if not self._is_live():
                return
            cancel_run(self.run, at_once)
            deadline = time.monotonic() + SECONDS_TO_CANCEL
            while self._is_live() and time.monotonic() < deadline:
                self._ask()
                time.sleep(FIRST_QUESTION)

    def failure(self) -> tuple[str, str] | None:
        """Outcome and reason, from the scheduler's state and the output of the ranks."""
        if self._never is not None:
            return outcome.CRASHED, f"{self._launch.backend} will never start it: {self._never}"
        bad = [each for each in self._now if each["state"] == self.state]
        code = next((each["exit_code"] for each in bad if each.get("exit_code")), None)
        state = self.state
        return outcome.of_state(state, code, self.log.tail) if state is not None and state in ENDED else None


def can_be_taken_up(run: Path) -> bool:
    """Whether a killed tuner left a job here that still runs or has finished since."""
    try:
        launch = launched(run)
        if launch is None or len(launch.jobs) < len(launch.marks):  # The tuner was killed before it submitted all jobs.
            return False
        state = launch_record.state(launch_record.refresh(run), launch)
    except UserError:
        return False
    return state is not None and (state not in ENDED or state is JobState.FINISHED)


def abandon(run: Path) -> None:
    """Cancel a job that no worker will follow."""
    try:
        launch = launched(run)
        if launch is None or not launch.jobs:
            return
        reported = cancel_run(run)
    except SteelyardError as error:
        console.warn(f"cannot cancel the job of {run}: {error}")
        return
    if reported["cancelled"]:
        console.say(f"job {', '.join(reported['jobs'])} of {run} is cancelled: no worker follows it")
