"""Elastic runs on a real Slurm: a node loses its power or is drained, and a run that waits comes to its time limit."""

import re
import shlex
from pathlib import Path

import pytest

from steelyard.launch import elastic, elastic_job, node_end
from tests.cluster.conftest import STEPS, Yard, everything, losses
from tests.cluster.test_going_on import limit_soon
from tests.test_guides import commands

GONE = ("does not answer since", "lost its node agent")  # By its heartbeats, or by Slurm if that is faster.
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]
PLAN = """
[parallel]
data = 2
placement = ["a10:2"]
"""


def test_the_guide_to_elastic_runs_works_as_written_when_a_node_loses_its_power(yard: Yard, undisturbed: Path):
    """Its recipe at toy size, its lines as they are."""
    recipe = (yard.path / "alike.toml").read_text().replace("steps = 20", f"steps = {STEPS}")
    (yard.path / "elastic.toml").write_text(recipe + PLAN)
    lines = [shlex.split(line)[1:] for line in commands("guide-elastic.md") if "elastic" in line]
    assert [line[0] for line in lines] == ["submit", "submit", "watch", "watch", "report"]
    run = yard.path / "runs" / "elastic"
    assert "--no-kill" in yard.steelyard(*lines[0]).stdout
    yard.steelyard(*lines[1])
    with yard.held(run):
        watched = yard.steelyard(*lines[2], code=None)  # A rank is held, which takes a while to be noticed.
        assert "elastic" in watched.stdout
        yard.lab.power_off("a2")
    try:
        assert yard.until_state(run, "finished", "failed", seconds=600) == "finished", everything(run)
    finally:
        yard.lab.power_on("a2")
    yard.steelyard(*lines[3])
    yard.steelyard(*lines[4])
    first, second = attempts_of(run)
    assert (first["nodes"], second["nodes"]) == (["a1", "a2"], ["a1"])
    assert second["unused"]["a2"].startswith(GONE)
    assert losses(run) == pytest.approx(losses(undisturbed), rel=1e-3)
    assert {record["restarts"] for record in yard.records(run)} == {0}, "the job was not queued again"
    assert yard.verdicts(run, 0) == {"completed"}


def test_a_drained_node_is_given_back_and_a_job_that_waits_for_it_is_requeued_at_its_time_limit(
    yard: Yard, undisturbed: Path
):
    """Slurm drains a node of a job that needs two. No step runs when the warning of the time limit arrives."""
    recipe = (yard.path / "alike.toml").read_text().replace("steps = 20", f"steps = {STEPS}")
    (yard.path / "drained.toml").write_text(recipe + PLAN)
    words = ("drained.toml", "--on", "slurm", "--cluster", "cluster.toml", "--min-nodes", "2", "--name", "drained")
    run = yard.submit(*words, "--time", "30", "site.slurm.warning_seconds=60")
    try:
        with yard.held(run):
            yard.lab.client("scontrol", "update", "NodeName=a2", "State=DRAIN", "Reason=test")
            asked = (run / "launch").glob
            yard.lab.until(lambda: any(asked(f"{node_end.REQUEST}*")), "the request to save", 240)
        yard.lab.until(lambda: "waiting" in elastic_job.attempts(run)[-1], "a reason to wait", 240)
        assert "needs 2 nodes, 1 is alive (a2 is drain" in elastic_job.attempts(run)[-1]["waiting"]
        saved = elastic.newest_checkpoint(run)
        assert 10 < saved < STEPS, "the ranks saved when the node was drained"
        limit_soon(yard, run)
        [job] = yard.until_pending(run)
    finally:
        yard.lab.client("scontrol", "update", "NodeName=a2", "State=RESUME")
    said = (run / "logs" / f"slurm-{job}.log").read_text()
    assert "stopped by SIGUSR1 between attempts" in said, everything(run)
    assert "requeueing the job" in said
    yard.lab.client("scontrol", "update", f"job={job}", "TimeLimit=30")
    yard.hurry(run)
    assert yard.until_state(run, "finished", "failed", seconds=600) == "finished", everything(run)
    assert f"resumed at step {saved}" in (run / "logs" / "a1.out").read_text()
    assert losses(run) == pytest.approx(losses(undisturbed), rel=1e-3)


def test_a_run_that_loses_a_node_goes_on_from_a_memory_checkpoint(yard: Yard, undisturbed: Path):
    """The states of both nodes are in the memory of the one that is left: its own, and the copy of the other's."""
    recipe = (yard.path / "alike.toml").read_text().replace("steps = 20", f"steps = {STEPS}")
    (yard.path / "remembered.toml").write_text(recipe + PLAN + "zero = 1\n")
    words = (
        "remembered.toml",
        "--on",
        "slurm",
        "--cluster",
        "cluster.toml",
        "--min-nodes",
        "1",
        "--name",
        "remembered",
    )
    run = yard.submit(*words, "checkpoint.every=0", "checkpoint.memory_every=2")
    with yard.held(run):
        yard.lab.power_off("a2")
    try:
        assert yard.until_state(run, "finished", "failed", seconds=600) == "finished", everything(run)
    finally:
        yard.lab.power_on("a2")
    first, second = attempts_of(run)
    assert (first["nodes"], second["nodes"]) == (["a1", "a2"], ["a1"])
    said = (run / "logs" / "a1.out").read_text()
    assert re.search(r"resumed at step (?!0 )\d+ from a memory checkpoint \(none is on disk\)", said), everything(run)
    assert losses(run) == pytest.approx(losses(undisturbed), rel=1e-3)


def test_a_heterogeneous_job_shrinks_when_a_node_loses_its_power_and_grows_when_it_is_back(yard: Yard):
    """Slurm has removed the node from the job when it is back, so the job is queued again, with both its parts."""
    words = ("mixed.toml", "--on", "slurm", "--cluster", "cluster.toml", "--site", "yard", "--min-nodes", "2")
    run = yard.submit(*words, "--name", "two-parts", "train.steps=100000", "checkpoint.every=20")
    yard.until_step(run, 10)
    yard.lab.power_off("b2")
    try:
        yard.lab.until(lambda: len(attempts_of(run)) > 1, "an attempt without the node", 300)
        second = attempts_of(run)[1]
        assert sorted([*second["nodes"], *second["unused"]]) == ["a1", "a2", "b1", "b2"], everything(run)
        assert len(second["nodes"]) > 1  # The planner may leave out one of the slower nodes.
        assert second["unused"]["b2"].startswith(GONE)
        yard.lab.until(lambda: "down" in yard.lab.client("sinfo", "-hNn", "b2", "-o%T").stdout, "b2 to be down", 300)
    finally:
        yard.lab.power_on("b2")
    yard.hurry(run)
    yard.lab.until(lambda: len(attempts_of(run)) > 2, "an attempt on four nodes", 300)
    third = attempts_of(run)[2]
    assert third["nodes"] == ["a1", "a2", "b1", "b2"], everything(run)
    assert "partition" in third["layout"]
    resumed = elastic.newest_checkpoint(run)
    yard.until_step(run, resumed + 5)
    yard.steelyard("cancel", "two-parts")
    assert yard.until_state(run, "cancelled", seconds=600) == "cancelled"
    assert sorted(losses(run)) == list(range(1, len(losses(run)) + 1)), "no step is missing"


def attempts_of(run: Path) -> list[dict]:
    return [each for each in elastic_job.attempts(run) if "attempt" in each]


def test_where_a_site_forbids_no_kill_the_run_goes_on_as_a_new_job_on_the_nodes_that_exist(
    yard: Yard, undisturbed: Path
):
    recipe = (yard.path / "alike.toml").read_text().replace("steps = 20", f"steps = {STEPS}")
    (yard.path / "strict.toml").write_text(recipe + PLAN)
    words = ("strict.toml", "--on", "slurm", "--cluster", "cluster.toml", "--min-nodes", "1", "--name", "strict")
    run = yard.submit(*words, 'site.slurm.sbatch=["--no-kill=off"]')
    try:
        with yard.held(run, step=15):
            yard.lab.power_off("a2")
            yard.until_pending(run)
        # Slurm lets it wait for two minutes.
        assert yard.until_state(run, "finished", "failed", seconds=700) == "finished", everything(run)
    finally:
        yard.lab.power_on("a2")
    attempts = attempts_of(run)
    assert (attempts[0]["nodes"], attempts[-1]["nodes"]) == (["a1", "a2"], ["a1"])
    assert max(record["restarts"] for record in yard.records(run)) == 1, "the job was queued again"
    assert losses(run) == pytest.approx(losses(undisturbed), rel=1e-3)
