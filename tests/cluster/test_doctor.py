"""Doctor as a job: the ranks of the job exchange, and the network between their nodes is what is measured."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.conftest import Yard, everything

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]


def test_doctor_in_a_job_measures_between_its_nodes(yard: Yard):
    words = ["--json", "--on", "slurm", "--nodes", "2", "--name", "fit", "--", "doctor", "--json"]
    run = Path(json.loads(yard.steelyard("submit", *words).stdout)["run"])
    yard.until_state(run, "finished", "failed")
    spoke = [path for path in (run / "logs").glob("*.out") if path.read_text().strip()]
    assert [path.stem for path in spoke] == ["a1"], everything(run)
    reported = json.loads(spoke[0].read_text().strip().splitlines()[-1])
    [exchange] = [finding for finding in reported["findings"] if finding["topic"] == "all-reduce"]
    assert exchange["verdict"] == "ok", exchange
    assert (exchange["facts"]["hosts"], exchange["facts"]["ranks"], exchange["facts"]["right"]) == (2, 2, True)


def test_doctor_on_the_head_node_sees_slurm_and_its_partitions(yard: Yard):
    done = subprocess.run(
        [sys.executable, "-P", "-m", "steelyard", "doctor", "--quick", "--json"],
        cwd=yard.path, env=yard.environment, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    [slurm] = [finding for finding in json.loads(done.stdout)["findings"] if finding["name"] == "Slurm"]
    assert slurm["verdict"] == "ok", slurm
    assert "a10" in slurm["words"]
    assert "a100" in slurm["words"]
