"""The runs that `steelyard serve` shows, and its answers about them. A run is read only when a browser asks for it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from steelyard.core.errors import UserError
from steelyard.core.run import Run
from steelyard.launch import find_runs
from steelyard.observe import log_search
from steelyard.observe.report.pipeline_section import timeline_data
from steelyard.observe.report.recipe_section import differences
from steelyard.observe.run_curves import RunCurves
from steelyard.observe.run_state import RunState
from steelyard.observe.run_view import curves_view, summary, view
from steelyard.observe.scheduler_poll import SchedulerPoll
from steelyard.observe.verdict import has_ended

SECONDS_FRESH = 1.5  # A run is refreshed no more often than this, for any number of browsers.
SECONDS_LISTED = 5.0
MOST_POINTS = 1500  # of a curve: a page fetches them every two seconds
MOST_SPANS = 100_000
MOST_CHANGES = 100  # of the verdict
MOST_COMPARED = 8
Answer = dict[str, Any]


class ServedRun:
    """One run, refreshed on request if its cached answer is too old."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.state, self.poll, self.lock = RunState(path), SchedulerPoll(path), threading.Lock()
        self.curves = RunCurves(path, MOST_POINTS)
        self.changes: list[Answer] = []
        """Verdicts that differ from the one before, since this server first saw the run."""
        self._answers: dict[str, tuple[float, Answer]] = {}
        self._worst: tuple[str, str] | None = None

    def summary(self) -> Answer:
        """One line of the list."""
        return self._answer("summary", summary, SECONDS_LISTED)

    def view(self) -> Answer:
        """The full view."""
        return self._answer("view", view, SECONDS_FRESH)

    def curve_data(self) -> Answer:
        """The charts of the run, with markers."""
        return self._answer("curves", lambda state: curves_view(state, self.curves, self.changes), SECONDS_FRESH)

    def timeline(self) -> Answer:
        """The recorded timeline, measured and predicted; empty without one."""
        with self.lock:
            try:
                return timeline_data(Run.open(self.path), None, (), MOST_SPANS) or {}
            except UserError as error:
                return {"note": str(error.message)}

    def _answer(self, name: str, make: Callable[[RunState], Answer], fresh: float) -> Answer:
        """The result of `make` for the run, at most `fresh` seconds old."""
        with self.lock:
            at, known = self._answers.get(name, (float("-inf"), {}))
            if time.monotonic() - at < fresh:
                return known
            # Most of hundreds of runs have ended, and polling the scheduler for each of them would take minutes.
            if not has_ended(self.state.refresh()):
                self.poll.update(self.state)
                self.state.refresh()
            answer = make(self.state)
            self._remember(answer.get("verdict") or next(iter(answer.get("verdicts", [])), None))
            self._answers[name] = time.monotonic(), answer
            return answer

    def _remember(self, verdict: dict[str, str] | None) -> None:
        """Note a change of the worst verdict, which becomes a marker in the curves."""
        if verdict is None or (verdict["kind"], verdict["level"]) == self._worst:
            return
        if self._worst is not None or verdict["level"] != "ok":
            step = self.state.metrics[-1]["step"] if self.state.metrics else None
            self.changes = [*self.changes, verdict | {"time": self.state.now, "step": step}][-MOST_CHANGES:]
        self._worst = verdict["kind"], verdict["level"]


class Runs:
    """The runs below a folder; the folder is scanned again every `SECONDS_LISTED` seconds."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder  # as given, so that a command in a hint can be copied to where the server was started
        self._lock = threading.Lock()
        self._found: dict[str, ServedRun] = {}
        self._looked = float("-inf")

    def found(self) -> dict[str, ServedRun]:
        """The runs by their path relative to the folder, which is their only id."""
        with self._lock:
            if time.monotonic() - self._looked > SECONDS_LISTED:
                paths = {_name(path.relative_to(self.folder)): path for path in find_runs.below(self.folder)}
                self._found = {name: self._found.get(name) or ServedRun(path) for name, path in paths.items()}
                self._looked = time.monotonic()
            return self._found

    def listed(self) -> Answer:
        """Summaries of all runs, newest first."""
        found = self.found()
        runs = [{"id": name, **run.summary()} for name, run in found.items()]
        return {"folder": _name(self.folder), "runs": sorted(runs, key=lambda run: -_moved(found[run["id"]].state))}

    def answer(self, path: str, asked: dict[str, list[str]]) -> Answer | None:
        """The answer to a request below `/api/`; None if there is no such run or request."""
        if path == "/api/runs":
            return self.listed()
        if path == "/api/recipes":
            return self._recipes(asked.get("id", []))
        run = self.found().get(_first(asked, "id"))
        if run is None:
            return None
        if path == "/api/logs":
            return log_search.search(run.path, _first(asked, "host"), _first(asked, "find"), _first(asked, "stream"))
        answers = {"/api/run": run.view, "/api/curves": run.curve_data, "/api/timeline": run.timeline}
        return answers[path]() if path in answers else None

    def _recipes(self, names: list[str]) -> Answer | None:
        """The keys of the recipes that differ: {"rows": [[key, value of each run, ...], ...]}."""
        found = self.found()
        if len(names) > MOST_COMPARED or any(name not in found for name in names):
            return None
        rows = differences([found[name].state.refresh().recipe for name in names])
        return {"rows": [[key, *values] for key, values in rows]}


def _first(asked: dict[str, list[str]], key: str) -> str:
    return asked.get(key, [""])[0]


def _moved(state: RunState) -> float:
    """Time of the last activity of a run."""
    return max(state.progressed or 0.0, state.began or 0.0)


def _name(path: Path) -> str:
    """A path as text, with invalid UTF-8 replaced, since a browser cannot request it."""
    return os.fsencode(path).decode("utf-8", "replace")
