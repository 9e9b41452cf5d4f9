"""Studies whose trials are jobs: of a real Slurm, and of mpirun over virtual hosts."""

import json
import shutil
import signal
import subprocess
import sys
import time

import pytest

from steelyard.tune import outcome, study_folder, trial_history
from tests.cluster.conftest import OVER_MPI, Yard, everything, metrics
from tests.conftest import kill

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]
STUDY = """
recipe = "alike.toml"
sampler = "grid"
[launch]
on = "{on}"
ranks_per_node = 1
[space]
parallel.data = [2, 1]
[[objectives]]
metric = "loss"
[budget]
trials = 2
[trial]
steps = {steps}
timeout_minutes = 10.0
[early_stopping]
enabled = false
"""


def losing_sbatch(yard: Yard):
    """A folder with an sbatch that hands the job over, and then loses whoever waits for its number."""
    folder = yard.path / "losing"
    folder.mkdir()
    (folder / "sbatch").write_text(f'#!/bin/bash\n{yard.lab.bin}/sbatch "$@" && kill -9 $PPID\n')
    (folder / "sbatch").chmod(0o755)
    return folder


def launches(study):
    """Job, nodes and ranks of every run whose job is written down, by trial."""
    found = {}
    for path in sorted((study / "trials").glob("*/run/launch.json")):
        launch = json.loads(path.read_text())
        if not launch["jobs"]:
            continue
        found[int(path.parts[-3])] = (launch["jobs"][0], launch["nodes"], launch["ranks"])
    return found


def outcomes(study):
    """How each trial ended."""
    return [trial_history.result_of(trial) for trial in study_folder.opened(study)[1].get_trials()]


def test_a_tuner_killed_twice_has_its_job_taken_up_and_nodes_follow_from_the_layout(yard: Yard):
    (yard.path / "jobs.toml").write_text(STUDY.format(on="slurm", steps=200))
    study = yard.path / "studies" / "jobs"
    command = [sys.executable, "-P", "-m", "steelyard", "tune", "jobs.toml"]
    run = study / "trials/00000/run"
    with open(yard.path / "tuner.log", "w") as log:
        losing = yard.environment | {"PATH": f"{losing_sbatch(yard)}:{yard.environment['PATH']}"}
        lost = subprocess.run(command, cwd=yard.path, env=losing, stdout=log, stderr=log, timeout=600)
        assert (lost.returncode, launches(study)) == (-signal.SIGKILL, {})
        two = [*command, "--workers", "2"]
        tuner = subprocess.Popen(two, cwd=yard.path, env=yard.environment, stdout=log, stderr=log)
    try:
        with yard.held(run):  # So that the first job does not end before the tuner is killed.
            yard.lab.until(lambda: len(set(launches(study).values())) == 2, "the job of the second worker", 240)
            kill(tuner)
    finally:
        kill(tuner)
    reported = json.loads(yard.steelyard("tune", "jobs.toml", "--json", "--workers", "2").stdout)
    # A worker whose job ends first may draw the values of the other again, which are then not run.
    ran = {name: count for name, count in reported["outcomes"].items() if name != outcome.REPEATED}
    assert (reported["trials"], ran) == (2, {"finished": 2, "lost": 3}), everything(run)
    found = launches(study)
    links = sorted((path.resolve(), path.parent) for path in (study / "trials").glob("*/run") if path.is_symlink())
    # Both jobs were followed on: no other was ever queued.
    assert sorted(set(found.values())) == [(found[0][0], 2, 2), (str(int(found[0][0]) + 1), 1, 1)]
    taken_up = max(trial for job, trial in links if job == run.resolve())
    assert len({job for job, _ in links}) == 2
    assert [record["step"] for record in metrics(run)] == [*range(10, 201, 10)]
    assert reported["best"][0]["values"]["loss"] < 5
    assert "step 200/200" in (taken_up / "log.txt").read_text()


def test_a_job_that_can_never_start_is_no_trial_to_wait_for(yard: Yard):
    (yard.path / "never.toml").write_text(STUDY.format(on="slurm", steps=3).replace("[2, 1]", "[1]"))
    done = yard.steelyard("tune", "never.toml", "--time", "2:00:00", code=1)
    assert "slurm will never start it: PartitionTimeLimit" in done.stderr
    assert yard.state(yard.path / "studies/never/trials/00000/run") == "cancelled"


def test_a_trial_that_takes_too_long_and_one_that_somebody_cancels_are_told_apart(yard: Yard):
    text = STUDY.format(on="slurm", steps=100000).replace("[2, 1]", "[1]").replace("= 10.0", "= 0.15")
    (yard.path / "endless.toml").write_text(text)
    study = yard.path / "studies" / "endless"
    command = [sys.executable, "-P", "-m", "steelyard", "tune", "endless.toml", "--json"]
    with open(yard.path / "endless.log", "w") as log:
        tuner = subprocess.Popen(command, cwd=yard.path, env=yard.environment, stdout=subprocess.PIPE, stderr=log)
    try:
        yard.lab.until(lambda: launches(study), "the first job", 240)
        assert yard.lab.client("scancel", launches(study)[0][0]).returncode == 0
        reported = json.loads(tuner.communicate(timeout=600)[0])
    finally:
        kill(tuner)
    assert outcomes(study) == [outcome.LOST, outcome.TIMED_OUT], (yard.path / "endless.log").read_text()
    assert reported["best"] == []
    records = (study / "trials/00001/run/scheduler.jsonl").read_text().splitlines()
    assert json.loads(records[-1])["state"] == "cancelled"
    deadline = time.monotonic() + 300
    while yard.lab.client("squeue", "--noheader", "--me").stdout:
        assert time.monotonic() < deadline
        time.sleep(0.5)


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="mpirun is not installed")
def test_trials_run_over_the_hosts_of_mpirun(yard: Yard):
    sites = yard.path / "of-mpirun.toml"
    sites.write_text(OVER_MPI.format(source=yard.environment["PYTHONPATH"], rsh=yard.lab.folder / "rsh"))
    (yard.path / "hosts.toml").write_text(STUDY.format(on="mpi", steps=10))
    words = ["tune", "hosts.toml", "--sites", str(sites), "--site", "hosts", "--json"]
    reported = json.loads(yard.steelyard(*words, beside="a1").stdout)
    assert reported["outcomes"] == {"finished": 2}
    assert [nodes_and_ranks[1:] for nodes_and_ranks in launches(yard.path / "studies/hosts").values()] == [
        (2, 2),
        (1, 1),
    ]
    assert (yard.path / "studies/hosts/trials/00000/run/logs/b1.out").is_file()
