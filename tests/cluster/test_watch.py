"""What watch says of real jobs on a real Slurm while things go wrong on purpose."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from steelyard.observe.run_state import RunState
from steelyard.observe.verdict import judge
from tests.cluster.conftest import Yard, everything, losses, rank_on

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]


def watched(yard: Yard, named: str, code: int) -> dict[str, str]:
    """Kind and message of each verdict, from the real command, which must exit with a code."""
    seen = json.loads(yard.steelyard("watch", named, "--json", code=code).stdout)
    return {verdict["kind"]: verdict["message"] for verdict in seen["verdicts"]}


def until_watched(yard: Yard, kind: str, named: str, *options: str, code: int, seconds: float = 400) -> str:
    """Watch until it says something with a code, and return its message."""
    deadline = time.monotonic() + seconds
    while True:
        command = [sys.executable, "-P", "-m", "steelyard", "watch", named, "--json", *options]
        done = subprocess.run(command, cwd=yard.path, env=yard.environment, capture_output=True, text=True, timeout=600)
        reported = {verdict["kind"]: verdict["message"] for verdict in json.loads(done.stdout)["verdicts"]}
        if done.returncode == code and kind in reported:
            return reported[kind]
        assert time.monotonic() < deadline, (done.returncode, reported)
        time.sleep(0.5)


def no_progress(yard: Yard) -> str:
    """What watch says of the run that stands still."""
    return until_watched(yard, "no-progress", "watched", "--patience", "5", code=1)


def until(holds: Callable[[], bool], run: Path, seconds: float = 400) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"{judge(RunState(run).refresh())}\n{everything(run)}"
        time.sleep(1)


def test_a_live_job_is_healthy_then_stands_still_then_goes_on_and_then_is_cancelled(yard: Yard):
    """One of its ranks is stopped for real. How long a pause may be is learned from the job's own steps."""
    run = yard.submit(
        "alike.toml", "parallel.data=2", "train.steps=100000", "checkpoint.every=0", "--nodes", "2", "--on", "slurm",
        "--name", "watched",
    )  # fmt: skip
    yard.until_step(run, 30)
    job = json.loads((run / "launch.json").read_text())["jobs"][0]
    assert list(watched(yard, job, 0)) == ["healthy"]  # by its number
    state = RunState(run).refresh()
    assert sorted(state.hosts) == sorted(state.devices) == ["a1", "a2"]
    assert [host["ranks"] for host in state.hosts.values()] == [[0], [1]]

    rank = rank_on(yard, run, "a2")
    os.kill(rank, signal.SIGSTOP)
    try:
        said = no_progress(yard)
        assert re.match(rf"no progress for 0:\d\d after step {max(losses(run))}, expected at most 0:\d\d", said), said
        hang = r"rank 0 waits in it since [\d:]+; rank 1 on a2 did not enter it and does not answer$"
        until(lambda: bool(re.search(hang, no_progress(yard))), run)  # Its flight record comes after a while.
        reported = watched(yard, "watched", 1)
        assert next(iter(reported)) == "frozen"
        assert re.fullmatch(r"stopped by a signal \(SIGSTOP\): rank 1, process \d+, on a2", reported["frozen"])
        assert yard.state(run) == "running"
    finally:
        os.kill(rank, signal.SIGCONT)
    until_watched(yard, "healthy", "watched", "--patience", "5", code=0)
    yard.steelyard("cancel", "watched", "--now")
    until(lambda: "cancelled" in yard.state(run), run)
    assert next(iter(watched(yard, "watched", 1))) == "cancelled"


def test_nodes_that_read_an_old_recipe_are_named_whether_they_agree_or_not(yard: Yard):
    """Nodes have an old copy where the others have the shared file.

    One of two ends the job before its first step. Both agree and train on, and only watch knows what was asked for.
    """
    words = ["alike.toml", "parallel.data=2", "train.steps=100000", "checkpoint.every=0", "--nodes", "2"]
    words += ["--on", "slurm", 'site.slurm.sbatch=["--hold"]']
    runs = {name: yard.submit(*words, "--name", name) for name in ("astray", "outdated")}
    assert list(watched(yard, "astray", 1)) == ["held"]
    mounted = [("a2", "astray"), ("a1", "outdated"), ("a2", "outdated")]
    for host, name in mounted:
        submitted, stale = runs[name] / "launch" / "recipe.toml", yard.path / f"stale-{name}.toml"
        stale.write_text(submitted.read_text().replace("micro_batch = 2", "micro_batch = 1"))
        assert stale.read_text() != submitted.read_text()
        yard.lab.run(host, "mount", "--bind", str(stale), str(submitted))
    try:
        for run in runs.values():
            yard.lab.client("scontrol", "release", json.loads((run / "launch.json").read_text())["jobs"][0])
        until(lambda: yard.state(runs["astray"]) == "failed", runs["astray"])
        reported = watched(yard, "astray", 1)
        assert list(reported)[:2] == ["errors", "failed"]
        said = (runs["astray"] / "logs" / "a1.err").read_text()
        assert "the ranks read different recipes:\n  train.micro_batch: 2 on a1, 1 on a2\n" in said, said
        assert not losses(runs["astray"])
        yard.until_step(runs["outdated"], 30)
        reported = watched(yard, "outdated", 1)
        assert reported == {"other-configuration": "a1 has micro_batch 1, but 2 was requested (and 1 more)"}
        assert yard.state(runs["outdated"]) == "running"
        page = yard.steelyard("watch", "outdated", code=1).stdout
        assert re.search(r"^requested .* micro_batch 2 ", page, re.MULTILINE), page
        assert re.search(r"^reported .* micro_batch 1 ", page, re.MULTILINE), page
    finally:
        yard.steelyard("cancel", "outdated", "--now")
        until(lambda: "cancelled" in yard.state(runs["outdated"]), runs["outdated"])
        for host, name in mounted:
            yard.lab.run(host, "umount", str(runs[name] / "launch" / "recipe.toml"))


def test_a_job_that_fails_names_its_error(yard: Yard):
    run = yard.submit("alike.toml", 'data.train="nothing_here"', "--skip-checks", "--on", "slurm", "--name", "lost")
    until(lambda: "failed" in yard.state(run), run)
    reported = watched(yard, "lost", 1)
    assert list(reported)[:2] == ["errors", "failed"]
    assert "nothing_here" in reported["errors"]
