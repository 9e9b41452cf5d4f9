"""Profiles of runs that Slurm starts."""

import json

import pytest

from steelyard.core.run import Run
from steelyard.observe import report
from tests.cluster.conftest import Yard

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


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
    assert "the plan&#x27;s prediction" in page
    assert "No prediction" not in page
