"""Jobs on a real Slurm with real ranks: they train, end, are requeued and go on, and the run folder tells it all."""

import json
import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from steelyard.cli import COMMANDS
from tests.cluster.conftest import STEPS, Yard, assert_trained_on_four_nodes, everything, losses, rank_on
from tests.test_guides import commands

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]


def test_alike_nodes_train_as_one_job(yard: Yard, undisturbed: Path):
    assert sorted(losses(undisturbed)) == list(range(1, STEPS + 1))
    launch = json.loads((undisturbed / "launch.json").read_text())
    assert (launch["backend"], launch["nodes"], launch["ranks"], launch["partitions"]) == ("slurm", 2, 2, ["a10"])
    records = yard.records(undisturbed)
    assert [record["state"] for record in records][-1] == "finished"
    assert (records[-1]["nodes"], records[-1]["exit_code"], records[-1]["time_limit"]) == ("a[1-2]", 0, 3600)
    for host in ("a1", "a2"):
        assert (undisturbed / "logs" / f"{host}.err").is_file()
        samples = [json.loads(line) for line in (undisturbed / "logs" / f"{host}.gpu").read_text().splitlines()]
        assert samples[-1]["host"] == host
        assert [device["memory_total"] > 0 for device in samples[-1]["devices"]] == [True]
    assert f"step {STEPS}/{STEPS}" in (undisturbed / "logs" / "a1.out").read_text()
    assert f"step {STEPS}/{STEPS}" in yard.steelyard("logs", "whole", "--node", "a1", "--stream", "out").stdout


def test_a_plan_over_two_partitions_trains_on_four_nodes(yard: Yard, undisturbed_mixed: Path):
    """As one heterogeneous job; a master and a follower do in test_going_on.py."""
    assert_trained_on_four_nodes(yard, undisturbed_mixed, jobs=1)


def test_a_lost_node_costs_no_step(yard: Yard, undisturbed: Path, undisturbed_mixed: Path):
    """One job, and a master and its follower: the master loses a node, and the follower is queued again with it.

    `watch` names the node long before Slurm does: its heartbeats end.
    """
    steps = (f"train.steps={STEPS}", "--on", "slurm")
    pair = yard.submit("mixed.toml", "--cluster", "cluster.toml", "--site", "apart", *steps, "--name", "robbed-pair")
    run = yard.submit("alike.toml", "parallel.data=2", "--nodes", "2", *steps, "--name", "robbed")
    with yard.held(run), yard.held(pair):
        yard.lab.power_off("a2")
        lost = time.monotonic()
    try:
        verdict = yard.until_verdict(run, "lost-node")
        print(f"watch named the node after {time.monotonic() - lost:.1f} s")  # docs/benchmarks.md
        assert re.match(r"a2 does not answer since \d\d:\d\d:\d\d", verdict["message"])
        yard.until_state(run, "queued", seconds=600)
        (verdict,) = yard.watched(run, 1)
        assert verdict["kind"] == "cannot-start"
        assert "needs 2 nodes of partition a10, 1 is alive (a2 is down)" in verdict["message"]
        yard.until_pending(pair)
    finally:
        yard.lab.power_on("a2")
    # They are not hurried on: Slurm repeats to the new attempt a signal that the lost node did not get, and its own two
    # minutes between attempts outlast that.
    for each, whole in ((run, undisturbed), (pair, undisturbed_mixed)):
        yard.until_state(each, "finished", seconds=600)
        assert losses(each) == losses(whole)
        assert yard.verdicts(each, 0) == {"completed"}
        assert {record["restarts"] for record in yard.records(each)[-len(_jobs(each)) :]} == {1}


def _jobs(run: Path) -> list[str]:
    return json.loads((run / "launch.json").read_text())["jobs"]


def test_a_cancelled_job_saves_and_is_not_requeued(yard: Yard):
    run = yard.submit("alike.toml", "train.steps=100000", "checkpoint.every=0", "--on", "slurm", "--name", "ended")
    yard.until_step(run, 5)
    reported = json.loads(yard.steelyard("cancel", "ended", "--json").stdout)
    assert reported["cancelled"]
    assert yard.until_state(run, "cancelled", seconds=600) == "cancelled"
    yard.lab.until(lambda: list((run / "checkpoints").glob("step-*")), "the checkpoint", 240)
    time.sleep(2)
    assert yard.state(run) == "cancelled"
    assert json.loads(yard.steelyard("cancel", "ended", "--json").stdout)["cancelled"] is False


def test_a_wedged_rank_fails_the_job_instead_of_holding_it(yard: Yard):
    run = yard.submit(
        "alike.toml", "parallel.data=2", "train.steps=100000", "parallel.timeout_minutes=0.1", "--nodes", "2",
        "--on", "slurm", "--name", "wedged",
    )  # fmt: skip
    yard.until_step(run, 5)
    os.kill(rank_on(yard, run, "a2"), signal.SIGSTOP)
    assert yard.until_state(run, "failed", "cancelled", "queued", seconds=600) == "failed", everything(run)
    assert "lost another rank" in (run / "logs" / "a1.err").read_text()
    assert "failed" in yard.verdicts(run, 1)


def test_a_full_disk_fails_the_job_and_says_so(yard: Yard):
    """The run folder lies on a small disk of one node's own, where it is submitted from and where it runs."""
    disk = yard.path / "small"
    disk.mkdir()
    yard.lab.mount("a1", disk, "8m")
    words = ["alike.toml", "train.steps=100000", "checkpoint.every=5", "checkpoint.keep_last=1000"]
    words += ["--run", str(disk / "full"), "--on", "slurm", 'site.slurm.sbatch=["--nodelist=a1"]']
    run = yard.submit(*words, on_host="a1")
    deadline = time.monotonic() + 300
    while (rows := yard.steelyard("list", str(disk), on_host="a1").stdout) and "failed" not in rows:
        assert time.monotonic() < deadline, rows
        time.sleep(1)
    said = yard.steelyard("logs", str(run), "--stream", "err", on_host="a1").stdout
    assert "No space left" in said or "disk" in said, said
    assert {"failed", "disk-full"} <= yard.verdicts(run, 1, on_host="a1")


def test_ranks_of_srun_by_hand_meet_over_two_partitions(yard: Yard):
    """No port is set, and none was chosen for them."""
    words = ["-m", "steelyard", "train", "alike.toml", "parallel.data=2", "train.steps=2", "--run", "by-hand"]
    text = f"#!/bin/bash\nsrun --het-group=0,1 {shlex.join([sys.executable, *words])}\n"
    (yard.path / "by-hand.sh").write_text(text)
    parts = ["--nodes=1", "--partition=a10", ":", "--nodes=1", "--partition=a100"]
    line = ["sbatch", "--parsable", "--output=by-hand.log", *parts, "by-hand.sh"]
    job = yard.lab.client(*line, cwd=yard.path, env=yard.environment).stdout.strip()
    ask = ("squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T")

    def has_ended() -> bool:
        states = set(yard.lab.client(*ask).stdout.split())  # Empty while Slurm does not answer.
        return bool(states) and states <= {"COMPLETED", "FAILED"}

    yard.lab.until(has_ended, "the end of the job", 600)
    assert "2/2" in (said := (yard.path / "by-hand.log").read_text()), said
    assert {path.stem for path in (yard.path / "by-hand" / "hosts").iterdir()} == {"a1", "b1"}


def test_nothing_a_person_writes_reaches_a_shell(yard: Yard, tmp_path: Path):
    hostile = "a b'\"$(touch pwned)`touch pwned`\n;touch pwned #"
    run = yard.submit(
        "alike.toml", "train.steps=2", "--on", "slurm", "--name", hostile,
        f"site.environment={{HOSTILE={json.dumps(hostile)}}}",
    )  # fmt: skip
    yard.until_state(run, "finished")
    assert json.loads((run / "launch.json").read_text())["name"] == hostile
    assert not list(yard.path.rglob("pwned"))


def test_a_sweep_is_one_array(yard: Yard):
    words = ["alike.toml", "train.steps=2", "--on", "slurm", "--name", "sweep", "--array", "train.seed=[1, 2]"]
    runs = json.loads(yard.steelyard("submit", *words, "--json").stdout)["runs"]
    jobs = [each["jobs"][0] for each in runs]
    assert [job.partition("_")[2] for job in jobs] == ["0", "1"]
    assert len({job.partition("_")[0] for job in jobs}) == 1
    paths = [Path(each["run"]) for each in runs]
    for path in paths:
        yard.until_state(path, "finished")
    assert losses(paths[0]) != losses(paths[1])


@pytest.fixture(scope="module")
def allocation(yard: Yard) -> Iterator[str]:
    """A job that does nothing, for others to run inside."""
    words = ("sbatch", "--parsable", "-N1", "-c2", "--output=/dev/null", "--wrap=sleep 600")
    job = yard.lab.client(*words).stdout.strip()
    ask = ("squeue", "--noheader", f"--jobs={job}", "--format=%T")
    try:
        yard.lab.until(lambda: "RUNNING" in yard.lab.client(*ask).stdout, "the allocation", 240)
        yield job
        assert "RUNNING" in yard.lab.client(*ask).stdout  # It is not ours to end.
    finally:
        yard.lab.client("scancel", job)


def test_a_command_runs_inside_an_allocation_that_is_there(yard: Yard, allocation: str):
    run = yard.submit("--on", "slurm", "--job", allocation, "--name", "inside", "--", "recipe", "list")
    yard.until_state(run, "finished")
    assert "quickstart" in "".join(path.read_text() for path in (run / "logs").glob("a*.out"))


@pytest.mark.parametrize("words", [(), ("--now",)], ids=["and saves", "at once"])
def test_a_run_inside_an_allocation_is_cancelled_with_its_ranks(yard: Yard, allocation: str, words: tuple[str, ...]):
    run = yard.submit(
        "alike.toml", "train.steps=100000", "checkpoint.every=0", "--on", "slurm", "--job", allocation, "--name",
        f"held{''.join(words)}",
    )  # fmt: skip
    yard.until_step(run, 5)
    yard.steelyard("cancel", str(run), *words)
    yard.until_state(run, "cancelled")
    ask = ("squeue", "--noheader", "--steps", f"--jobs={allocation}", "--format=%i")
    alone = [f"{allocation}.batch"]
    yard.lab.until(lambda: yard.lab.client(*ask).stdout.split() == alone, "the end of its step", 240)
    assert bool(list((run / "checkpoints").glob("step-*"))) == (not words)


def test_the_guide_to_slurm_works_as_written(yard: Yard):
    """Its recipe and cluster at toy size, its lines as they are."""
    recipe = (yard.path / "mixed.toml").read_text().replace('["a10:2", "a100:2"]', '["a100:1", "a10:2", "a100:1"]')
    (yard.path / "planned.toml").write_text(recipe)
    lines = [line for line in commands("guide-slurm.md") if line.split()[1] in COMMANDS]
    assert len(lines) >= 7
    for line in lines:
        said = yard.steelyard(*shlex.split(line)[1:]).stdout
        if " submit " in line and "--dry-run" not in line:
            run = yard.path / "runs" / "gpt2-xl"
            yard.until_state(run, "finished")
    assert "finished" in said
    assert sorted(losses(run)) == list(range(1, 21))
    where = {path.stem: path.read_text() for path in (run / "logs").glob("*.out")}
    assert [host for host, text in where.items() if "step 20/20" in text] in (["b1"], ["b2"])  # an a100 has rank 0
    assert (yard.path / "report.html").stat().st_size > 1000
