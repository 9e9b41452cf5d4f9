"""Profiles of runs that Slurm or mpirun starts."""

import json
import shutil

import pytest

from steelyard.core.run import Run
from steelyard.observe import report
from tests.cluster.conftest import OVER_MPI, Yard

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="mpirun is not installed")
def test_ranks_of_mpirun_on_two_hosts_are_profiled_and_read(yard: Yard):
    sites = yard.path / "profiled.toml"
    sites.write_text(OVER_MPI.format(source=yard.environment["PYTHONPATH"], rsh=yard.lab.folder / "rsh"))
    words = ["alike.toml", "parallel.data=2", "--on", "mpi", "--sites", str(sites), "--site", "hosts", "--nodes", "2"]
    result = json.loads(yard.steelyard("profile", *words, "--steps", "3-5", "--json", beside="a1").stdout)
    assert [(one["rank"], one["steps"]) for one in result["ranks"]] == [(0, 2), (1, 2)]
    assert all(one["communication"] > 0 for one in result["ranks"])
    hosts = yard.path / result["run"] / "hosts"
    assert {path.stem for path in hosts.iterdir()} == {"a1", "b1"}


def test_four_ranks_over_two_partitions_are_profiled_and_read(yard: Yard):
    words = ["mixed.toml", "--on", "slurm", "--cluster", "cluster.toml", "--steps", "3-5", "--ranks", "1,2", "--json"]
    result = json.loads(yard.steelyard("profile", *words).stdout)
    assert [(one["rank"], one["steps"]) for one in result["ranks"]] == [(1, 2), (2, 2)]
    assert all(one["communication"] > 0 for one in result["ranks"])
    run = Run.open(yard.path / result["run"])
    assert sorted(path.name for path in (run.path / "timeline").iterdir()) == [
        f"rank-0000{rank}.jsonl" for rank in range(4)
    ]
    page = report.render(run, cluster=yard.path / "cluster.toml")
    assert "Rank 2: 2 steps" in page
    assert "4 ranks" in page
    assert "<th>predicted</th>" in page
    assert "No prediction" not in page
