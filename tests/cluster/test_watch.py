"""What watch says of real jobs on a real Slurm while things go wrong on purpose."""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from steelyard.observe.state import State
from steelyard.observe.verdict import judge
from tests.cluster.conftest import Yard, everything, rank_on

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


def watched(yard: Yard, named: str, code: int) -> dict[str, str]:
    """Kind and message of each verdict, from the real command, which must exit with a code."""
    seen = json.loads(yard.steelyard("watch", named, "--json", code=code).stdout)
    return {verdict["kind"]: verdict["message"] for verdict in seen["verdicts"]}


def judged(run: Path, later: float = 0.0) -> dict[str, str]:
    """The verdicts as they will be so many seconds later if nothing happens until then."""
    return {verdict.kind: verdict.message for verdict in judge(State(run).refresh(time.time() + later))}


def until(holds: Callable[[], bool], run: Path, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"{judged(run)}\n{everything(run)}"
        time.sleep(1)


def test_a_job_is_healthy_then_differs_then_hangs_and_then_is_cancelled(yard: Yard):
    run = yard.submit(
        "alike.toml", "parallel.data=2", "train.steps=100000", "--nodes", "2", "--on", "slurm", "--name", "watched"
    )
    yard.until_step(run, 30)
    job = json.loads((run / "launch.json").read_text())["jobs"][0]
    assert list(watched(yard, job, 0)) == ["healthy"]  # by its number
    state = State(run).refresh()
    assert sorted(state.hosts) == sorted(state.devices) == ["a1", "a2"]
    assert [host["ranks"] for host in state.hosts.values()] == [[0], [1]]

    submitted = run / "launch" / "recipe.toml"
    recipe = submitted.read_text()
    submitted.write_text(recipe.replace("micro_batch = 2", "micro_batch = 1"))
    assert "micro_batch 2 where 1 was asked for" in watched(yard, "watched", 1)["other-configuration"]
    submitted.write_text(recipe)

    rank = rank_on(yard, run, "a2")
    os.kill(rank, signal.SIGSTOP)
    try:
        time.sleep(3)
        assert "no-progress" not in judged(run)
        assert judged(run, later=300)["no-progress"].startswith("no progress for 5:0")
    finally:
        os.kill(rank, signal.SIGCONT)
    yard.steelyard("cancel", "watched", "--now")
    until(lambda: "CANCELLED" in yard.state(run), run)
    assert next(iter(watched(yard, "watched", 1))) == "cancelled"


def test_a_job_that_lost_its_node_waits_to_go_on_and_one_that_cannot_start_says_why(yard: Yard):
    run = yard.submit(
        "alike.toml", "parallel.data=2", "train.steps=100000", "checkpoint.every=20", "--nodes", "2", "--on", "slurm",
        "--name", "dark",
    )  # fmt: skip
    yard.until_step(run, 30)
    yard.lab.power_off("a2")
    try:
        until(lambda: "PENDING" in yard.state(run), run, 90)
        told = watched(yard, "dark", 3)
        assert list(told) == ["requeued"]
        assert "after 1 restart" in told["requeued"]
    finally:
        yard.lab.power_on("a2")
        yard.steelyard("cancel", "dark", "--now")
    until(lambda: "CANCELLED" in yard.state(run), run)
    assert next(iter(watched(yard, "dark", 1))) == "cancelled"


def test_a_job_that_fails_names_its_error(yard: Yard):
    run = yard.submit("alike.toml", 'data.train="nothing_here"', "--on", "slurm", "--name", "lost")
    until(lambda: "FAILED" in yard.state(run), run)
    told = watched(yard, "lost", 1)
    assert list(told)[:2] == ["errors", "failed"]
    assert "nothing_here" in told["errors"]
