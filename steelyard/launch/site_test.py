"""The test job of `steelyard site init`: one rank on one node that reports its Python, torch and GPU, and a verdict."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from steelyard.core.console import console
from steelyard.core.recipe.site_section import SiteSection
from steelyard.core.safe_parse import json_objects
from steelyard.launch import backends, launch_record, log_reader
from steelyard.launch.backends import ENDED, JobState
from steelyard.launch.submit import SubmitRequest, submit

NAME, MINUTES = "site-test", 10
SECONDS_BETWEEN_POLLS, SECONDS_BETWEEN_LINES = 2.0, 10.0
LAST_LINES = 5


def try_site(name: str, site: SiteSection, patience: float) -> dict[str, Any]:
    """Submit the job, wait up to `patience` seconds for its end, and return the verdict.

    `works` is None if the job still waits.
    """
    request = SubmitRequest("slurm", _for_test(site), words=_command(site), name=NAME, site_name=name)
    submitted = submit(request)
    run, job = Path(submitted["run"]), ", ".join(submitted["jobs"])
    state, reason = _wait(run, job, patience)
    result: dict[str, Any] = {"run": str(run), "job": job, "state": str(state), "works": None}
    if state not in ENDED:
        return result | {
            "verdict": f"job {job} is {state} after {patience:.0f} s" + (f": {reason}" if reason else ""),
            "hint": f"steelyard logs {run} shows its output when it has run; steelyard cancel {run} removes it",
        }
    facts = _facts(run)
    result |= {"works": bool(facts and facts.get("works") and state is JobState.FINISHED), "facts": facts}
    if facts is not None:
        return result | {"verdict": f"job {job} on {facts['host']}: {facts['verdict']}", "hint": facts.get("hint")}
    lines = [line for path in log_reader.paths(run) for line in log_reader.tail(path, LAST_LINES)]
    verdict = "\n  ".join([f"job {job} {state} before Steelyard started on the node", *lines[-LAST_LINES:]])
    return result | {
        "verdict": verdict,
        "hint": f"steelyard doctor explain {run}; --dry-run of submit shows the script",
    }


def _for_test(site: SiteSection) -> SiteSection:
    """The site with one GPU instead of all of a node, a short time limit, and no requeue."""
    gres = site.slurm.gres
    one = {"gres": gres if gres is None else f"{gres.rpartition(':')[0]}:1", "time_limit": f"00:{MINUTES:02d}:00"}
    small = site.model_copy(update={"slurm": site.slurm.model_copy(update=one)})
    return backends.load("slurm").trial_site(small, MINUTES)


def _command(site: SiteSection) -> list[str]:
    return ["site", "check", "--gpus", "1" if site.slurm.gres else "0", "--json"]


def _wait(run: Path, job: str, patience: float) -> tuple[JobState | None, str]:
    launch = launch_record.read(run)
    assert launch is not None
    deadline, next_line, shown = time.monotonic() + patience, 0.0, None
    while True:
        records = launch_record.refresh(run)
        state = launch_record.state(records, launch)
        reason = next((str(each.get("reason") or "") for each in reversed(records)), "")
        if state in ENDED or time.monotonic() > deadline:
            return state, reason
        if state != shown or time.monotonic() > next_line:
            console.say(f"job {job}: {state}" + (f" ({reason})" if reason else ""))
            shown, next_line = state, time.monotonic() + SECONDS_BETWEEN_LINES
        time.sleep(SECONDS_BETWEEN_POLLS)


def _facts(run: Path) -> dict[str, Any] | None:
    """What the node reported."""
    for path in sorted((run / "logs").glob("*.out")):
        for value in json_objects(log_reader.tail(path, 100)):
            if {"host", "verdict"} <= value.keys():
                return value
    return None
