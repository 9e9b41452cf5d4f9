"""Supervises an elastic run: `python -m steelyard.launch.elastic RUN`, started by `submit --min-nodes`.

    plan     choose layout and nodes for the next attempt (`replan.py`); wait while too few nodes can be used
    start    one node agent per node: a process here, or a job step on the node
    watch    a node is lost if its agent is gone, its heartbeat stops, or its ranks do not respond when others time out;
             a drained node is given back after a save; a node that returned is used after the next checkpoint
    stop     ranks of a lost attempt are killed, and the run continues from its last checkpoint as the next attempt

A rank that fails on its own, such as with a user error or without a loadable checkpoint, ends the run.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from steelyard.core import files
from steelyard.core.console import console
from steelyard.core.errors import Interrupted, RuntimeFailure, SteelyardError
from steelyard.core.file_tail import last_lines
from steelyard.core.recipe import load_recipe, to_toml
from steelyard.core.run import METRICS
from steelyard.core.safe_parse import json_objects
from steelyard.launch import backends, disk_errors, elastic_job, heartbeat, lock_wait, node_end
from steelyard.launch.elastic_attempt import Attempt
from steelyard.launch.elastic_job import SUBMITTED, Node
from steelyard.launch.launch_record import FOLDER
from steelyard.launch.node_end import CLOCK, KILL, SAVE, NodeEnd
from steelyard.launch.replan import AttemptPlan, plan
from steelyard.launch.site_environment import SAME_REQUEST_SECONDS
from steelyard.launch.spawn import signals

DRAIN = "drain"
SECONDS_BETWEEN_LOOKS = 0.5
SECONDS_BETWEEN_PLANS = 5.0
LOST_AFTER = 12.0  # seconds without a heartbeat
SECONDS_TO_NOTICE = 12.0  # from the first rank that lost others until all must have ended
MOST_IN_VAIN = 10  # attempts in a row that end before their first step
MOST_LOSSES = 3  # of one node, which is then used only if the run could not continue without it


@dataclass(frozen=True)
class Loss:
    """Why a node was lost, when, at which checkpoint, and how often so far."""

    why: str
    step: int
    count: int


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended: the exit code of the run, or why there is another attempt, and the nodes it lost."""

    code: int | None = None
    why: str = ""
    lost: tuple[tuple[str, str], ...] = ()


class Elastic:
    """The state of an elastic run between its attempts."""

    def __init__(self, run: Path, stop_signals: list[int]) -> None:
        self.run, self.stop_signals = run, stop_signals
        self.job = elastic_job.read(run)
        self.backend = backends.load(self.job.backend)
        self.recipe = load_recipe(run / FOLDER / SUBMITTED)
        self.losses: dict[str, Loss] = {}
        self.considered: set[str] = set()
        """The nodes that could be used when the current attempt was planned."""
        self.unused: dict[str, str] = {}
        self.is_requeued = False
        """Whether the job is queued again after the save that was requested."""

    def supervise(self) -> int:
        """Run attempts until the run has finished, failed or was stopped. Returns the exit code."""
        before = elastic_job.attempts(self.run)[-1:]
        why = "the job was queued again" if before and "submitted" not in before[0] else "submitted"
        detected, in_vain, number = time.time(), 0, 0
        while lock_wait.until_free(self.run, self.stop_signals, self._wait_for):
            if (planned := self._plan()) is None:
                break
            saved, began = newest_checkpoint(self.run), time.time()
            number = 1 + max(number, sum("attempt" in each for each in elastic_job.attempts(self.run)))
            if not disk_errors.until_done(lambda: self._prepare(planned), "launch/recipe.toml", self.stop_signals):
                break
            self._record(number, why, detected, planned)
            attempt = Attempt(self.run, f"{self.backend.attempt_name(os.environ)}.{number}", planned, self.job)
            outcome = self._watch(attempt, saved)
            detected, why = time.time(), outcome.why
            if outcome.code is not None:
                attempt.stop(())
                disk_errors.say(f"attempt {number} ended" + (f": {why}" if why else ""))
                return outcome.code
            disk_errors.say(f"attempt {number} ended: {why}")
            attempt.stop([name for name, _ in outcome.lost])
            step = newest_checkpoint(self.run)
            for name, reason in outcome.lost:
                self.losses[name] = Loss(reason, step, 1 + (self.losses[name].count if name in self.losses else 0))
            in_vain = 0 if step > saved or last_record(self.run) > began else in_vain + 1
            if in_vain >= MOST_IN_VAIN:
                raise RuntimeFailure(f"{in_vain} attempts in a row ended before a step; the last one: {why}")
        name = signal.Signals(self.stop_signals[0]).name
        disk_errors.say(f"stopped by {name} between attempts; the run can continue from its last checkpoint")
        return Interrupted.exit_code

    def _prepare(self, planned: AttemptPlan) -> None:
        """Write the recipe of an attempt; remove heartbeats of the previous one."""
        for name in heartbeat.beats(self.run):
            (self.run / FOLDER / heartbeat.ALIVE / name).unlink(missing_ok=True)
        files.write_text(self.run / FOLDER / "recipe.toml", to_toml(planned.recipe.settings()))

    def _record(self, number: int, why: str, detected: float, planned: AttemptPlan) -> None:
        """Write the line of an attempt in `attempts.jsonl`."""
        names = [node.name for node in planned.nodes]
        idle = dict.fromkeys(sorted(self.considered - set(names)), "is not used by the best layout")
        record = {"attempt": number, "why": why, "detected": detected, "nodes": names, "unused": self.unused | idle}
        with disk_errors.logged(elastic_job.ATTEMPTS):
            elastic_job.append(self.run, record | {"ranks": sum(planned.ranks), "layout": planned.layout()})
        disk_errors.say(f"attempt {number} on {', '.join(names)}: {why}")

    def _plan(self) -> AttemptPlan | None:
        """The plan for the nodes that can be used, as soon as there is one; None if a stop signal arrives first."""
        waiting, is_patient = "", True
        while not self.stop_signals:
            usable = self._usable(is_patient)
            planned = plan(self.job, self.recipe, usable)
            if isinstance(planned, AttemptPlan):
                self.considered = {node.name for node in usable}
                return planned
            unused = elastic_job.described(self.unused, sorted(self.unused))
            message = planned + (f" ({unused})" if unused else "")
            if message != waiting and not is_patient:
                self._wait_for(message)
                waiting = message
            until = time.monotonic() + (0 if is_patient else SECONDS_BETWEEN_PLANS)
            while time.monotonic() < until and not self.stop_signals:
                time.sleep(SECONDS_BETWEEN_LOOKS)
            is_patient = False  # Without a plan, a lost node that answers is used again before the next checkpoint.
        return None

    def _wait_for(self, reason: str) -> None:
        with disk_errors.logged(elastic_job.ATTEMPTS):
            elastic_job.append(self.run, {"waiting": reason})
        disk_errors.say(f"waiting: {reason}")

    def _usable(self, is_patient: bool = True) -> list[Node]:
        """The nodes that can be used now; `unused` gets the others and the reasons."""
        nodes, step = self.backend.allocated(self.job, os.environ), newest_checkpoint(self.run)
        names = [node.name for node in nodes]
        self.unused = _drained(self.run, names) | self.backend.unusable(names)
        for name, loss in self.losses.items():
            waits = is_patient and (loss.step >= step or loss.count >= MOST_LOSSES)
            here = [node for node in nodes if node.name == name and name not in self.unused]
            if waits or not here or not self.backend.answers(self.job, here[0]):
                self.unused.setdefault(name, loss.why)  # What the scheduler says of the node tells more.
        return [node for node in nodes if node.name not in self.unused]

    def _watch(self, attempt: Attempt, saved: int) -> Outcome:
        """Wait until an attempt ends, or must end."""
        why, asked, checked, looked = "", 0, saved, 0.0
        while True:
            time.sleep(SECONDS_BETWEEN_LOOKS)
            if len(self.stop_signals) > asked:
                asked = len(self.stop_signals)
                attempt.ask(SAVE if asked == 1 else KILL)
            attempt.send_request()
            ends = attempt.ends()
            outcome = self._judge(attempt, ends, why)
            if outcome is not None:
                return outcome
            step = newest_checkpoint(self.run)
            if why or asked or time.monotonic() < looked + SECONDS_BETWEEN_PLANS:
                continue
            looked = time.monotonic()
            drained = _drained(self.run, attempt.processes) | self.backend.unusable(list(attempt.processes))
            own = self.backend.supervised_on(os.environ)
            if own in drained and not self.backend.can_requeue(self.job, os.environ):
                del drained[own]  # The job would end with this node: it trains on as long as it may.
            if drained:
                why = elastic_job.described(drained, sorted(drained))
                self.is_requeued = own in drained
            elif step > checked:
                checked, why = step, self._returned(attempt)
            if why:
                attempt.ask(SAVE)

    def _returned(self, attempt: Attempt) -> str:
        """Which nodes the next attempt, or a new start of the job, would use in addition; empty if none."""
        usable = self._usable()
        for spare in ([], self.backend.spare(self.job, os.environ)):
            new = {node.name for node in [*usable, *spare]} - self.considered
            planned = plan(self.job, self.recipe, [*usable, *spare]) if new else ""
            if isinstance(planned, AttemptPlan) and len(planned.nodes) > len(attempt.plan.nodes):
                self.is_requeued = bool(spare)
                return f"{', '.join(sorted(new))} can be used{' again' if not spare else ''}"
        return ""

    def _judge(self, attempt: Attempt, ends: dict[str, NodeEnd], why: str) -> Outcome | None:
        """The outcome of an attempt; None while it goes on. `why` is the reason of a save that was requested."""
        if attempt.request == KILL:
            return Outcome(Interrupted.exit_code)
        running = [name for name in attempt.processes if name not in ends]
        failed = [name for name, end in ends.items() if end.is_cause]
        noticed = [name for name, end in ends.items() if end.code and not end.has_stopped]
        lost = self._lost(attempt, running)
        if lost:  # Errors of other ranks may follow from it.
            return Outcome(None, ", ".join(f"{name} {reason}" for name, reason in lost.items()), tuple(lost.items()))
        if noticed and attempt.noticed is None:
            attempt.noticed = time.monotonic()
        is_overdue = attempt.noticed is not None and time.monotonic() > attempt.noticed + SECONDS_TO_NOTICE
        if running and not is_overdue:
            return None
        if failed:
            return Outcome(ends[failed[0]].code)
        silent = dict.fromkeys([*running, *(name for name in noticed if ends[name].hung)], "stopped responding")
        if noticed:
            reason = ", ".join(f"ranks of {name} {each}" for name, each in silent.items())
            return Outcome(None, reason or "ranks lost each other", tuple(silent.items()))
        if any(end.has_stopped for end in ends.values()):
            is_next_here = why and not self.is_requeued and not self.stop_signals
            return Outcome(None, why) if is_next_here else Outcome(Interrupted.exit_code, why)
        return Outcome(0)

    def _lost(self, attempt: Attempt, running: Sequence[str]) -> dict[str, str]:
        """The nodes whose agents are gone or do not answer. All times are those of the filesystem."""
        clock = self.run / FOLDER / CLOCK
        try:
            clock.touch()
            beats, now = heartbeat.beats(self.run), clock.stat().st_mtime
        except OSError:  # A filesystem that does not answer for a moment: judge again.
            return {}
        attempt.heard.update(beats)
        found = {}
        for name in running:
            if attempt.processes[name].poll() is not None and node_end.read(self.run, attempt.name, name) is None:
                found[name] = "lost its node agent"
            elif name in beats and now - beats[name] > LOST_AFTER:
                found[name] = f"does not answer since {time.strftime('%H:%M:%S', time.localtime(beats[name]))}"
            elif name not in attempt.heard and time.monotonic() > attempt.began + self.job.seconds_to_start:
                found[name] = f"did not start within {self.job.seconds_to_start:.0f} s"
        return found


def newest_checkpoint(run: Path) -> int:
    """The step of the newest checkpoint; -1 if there is none."""
    names: list[str] = []
    with suppress(OSError):
        names = [path.name.removeprefix("step-") for path in (run / "checkpoints").glob("step-*")]
    return max((int(name) for name in names if name.isdigit()), default=-1)


def last_record(run: Path) -> float:
    """When the last step was recorded; 0 if none was."""
    last = list(json_objects(last_lines(run / METRICS, 2)))[-1:]  # A torn line may follow it.
    return float(last[0].get("time", 0.0)) if last else 0.0


def _drained(run: Path, names: Sequence[str] | dict[str, subprocess.Popen[bytes]]) -> dict[str, str]:
    """The nodes that `launch/drain` names, one per line."""
    try:
        lines = (run / FOLDER / DRAIN).read_text(encoding="utf-8").split()
    except OSError:
        return {}
    return {name: f"is drained ({FOLDER}/{DRAIN})" for name in names if name in lines}


def main(arguments: Sequence[str]) -> int:
    """Supervise the run in a folder."""
    run = Path(arguments[0])
    # The scheduler may signal the job script, which forwards the signal, and this process.
    with signals(SAME_REQUEST_SECONDS) as stop_signals, heartbeat.Heartbeat(run, file=CLOCK):
        try:
            return Elastic(run, stop_signals).supervise()
        except SteelyardError as error:
            console.error(str(error))
            return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
