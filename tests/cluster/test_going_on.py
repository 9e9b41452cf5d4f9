"""Jobs that a real Slurm stops on its own account: they save, give way, are queued again, and lose no step."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from steelyard.launch.backends.slurm_queue import seconds
from tests.cluster.conftest import STEPS, Yard, assert_trained_on_four_nodes, everything, losses

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]
ALIKE = ("alike.toml", "parallel.data=2", "--nodes", "2")
MIXED = ("mixed.toml", "--cluster", "cluster.toml")
LONG = (f"train.steps={STEPS}", "checkpoint.every=0", "--on", "slurm")  # Only a warning makes it save.


@pytest.fixture(autouse=True, scope="module")
def processes_of_slurm(yard: Yard, undisturbed: Path, undisturbed_mixed: Path) -> Iterator[None]:
    """No forks of loaded processes: Slurm signals, and lets go on, every process of a job, ranks included.

    The undisturbed runs, which come first, may be forks.
    """
    off = yard.lab.warm.with_suffix(".off")
    off.touch()
    yield
    off.unlink()


def test_a_preempted_job_saves_gives_way_and_goes_on(yard: Yard, undisturbed: Path):
    """Once with a time of grace and once without, when Slurm leaves it a few seconds (KillWait)."""
    run = yard.submit(*ALIKE, *LONG, "--name", "poor", "site.slurm.partition=spare")
    for times, (grace, step) in enumerate(((30, 10), (0, 60)), start=1):
        yard.lab.client("scontrol", "update", "PartitionName=spare", f"GraceTime={grace}")
        with yard.held(run, step=step):
            rich = yard.lab.client(
                "sbatch", "--parsable", "--partition=urgent", "--nodes=2", "--nodelist=a[1-2]", "--exclusive",
                "--output=/dev/null", "--wrap=sleep 1",
            ).stdout.strip()  # fmt: skip
            yard.lab.until(lambda times=times: yard.is_warned(run, times), "the warning", 240)
        yard.until_state(run, "queued", seconds=600)
        saved = max(int(path.name.partition("-")[2]) for path in (run / "checkpoints").glob("step-*"))
        assert step <= saved < STEPS
        assert yard.verdicts(run, 3) == {"requeued"}
        yard.lab.until(lambda job=rich: "COMPLETED" in _states(yard, job), "the other job", 240)
        yard.hurry(run)
        yard.until_step(run, saved + 1)
        assert f"resumed at step {saved}" in (run / "logs" / "a1.out").read_text()
    yard.until_state(run, "finished")
    assert losses(run) == losses(undisturbed)
    assert max(record["restarts"] for record in yard.records(run)) == 2


def test_a_time_limit_saves_requeues_and_resumes_jobs_of_every_shape(
    yard: Yard, undisturbed: Path, undisturbed_mixed: Path
):
    """One job, a heterogeneous one, and a master with its follower, of which only the master comes to its limit.

    Slurm counts limits in minutes and looks every half, so the runs are held meanwhile.
    """
    words = {"one": ALIKE, "heterogeneous": MIXED, "pair": (*MIXED, "--site", "apart")}
    runs = {
        name: yard.submit(*given, *LONG, "--name", f"limited-{name}", "--time", "30", "site.slurm.warning_seconds=60")
        for name, given in words.items()
    }
    with ExitStack() as stack:
        held = {run: stack.enter_context(ExitStack()) for run in runs.values()}
        for run, hold in held.items():
            hold.enter_context(yard.held(run))
        _limit(yard, [_jobs(run)[0] for run in held])

        def release() -> bool:
            for run in [run for run in held if yard.is_warned(run)]:
                held.pop(run).close()
            return not held

        yard.lab.until(release, "all warnings", 120)
    for run in runs.values():
        [limited, *_] = yard.until_pending(run)
        yard.lab.client("scontrol", "update", f"job={limited}", "TimeLimit=30")
    yard.hurry(*runs.values())
    for name, run in runs.items():
        yard.until_state(run, "finished")
        assert "resumed at step" in (run / "logs" / "a1.out").read_text(), everything(run)
        assert losses(run) == losses(undisturbed if name == "one" else undisturbed_mixed), name
        restarts = {record["job"]: record["restarts"] for record in yard.records(run)}
        assert list(restarts.values()) == [1] * (1 if name == "one" else 2), restarts
    assert_trained_on_four_nodes(yard, runs["pair"], jobs=2)


def test_a_follower_does_not_wait_for_a_master_that_is_gone(yard: Yard):
    """The master never starts: its nodes are taken."""
    taken = yard.lab.client(
        "sbatch", "--parsable", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 300"
    ).stdout.strip()
    try:
        yard.lab.until(lambda: "RUNNING" in _states(yard, taken), "the nodes to be taken", 240)
        run = yard.submit(*MIXED, "--site", "apart", "--on", "slurm", "--name", "orphan")
        master, follower = _jobs(run)
        yard.lab.until((run / "launch" / "arrived-1.json").exists, "the follower", 240)
        yard.lab.client("scancel", master)
        yard.lab.until(lambda: "FAILED" in _states(yard, follower), "the follower's end", 240)
    finally:
        yard.lab.client("scancel", taken)
    assert yard.state(run) == "cancelled"
    assert "another job of this run is over" in (run / "logs" / f"slurm-{follower}.log").read_text()


def _jobs(run: Path) -> list[str]:
    return json.loads((run / "launch.json").read_text())["jobs"]


def _states(yard: Yard, job: str) -> list[str]:
    return yard.lab.client("squeue", "-h", "--states=all", "-j", job, "-o", "%T").stdout.split()


def limit_soon(yard: Yard, run: Path) -> None:
    """Bring a run to its time limit."""
    _limit(yard, _jobs(run))


def _limit(yard: Yard, jobs: list[str]) -> None:
    """Bring the time limits of running jobs to within 30 to 90 s: Slurm warns them at its next look."""
    used = max(seconds(yard.lab.client("squeue", "-h", "-j", job, "-o", "%M").stdout.split()[0]) or 0 for job in jobs)
    for job in jobs:
        done = yard.lab.client("scontrol", "update", f"job={job}", f"TimeLimit={(used + 30) // 60 + 1}")
        assert done.returncode == 0, done.stderr
