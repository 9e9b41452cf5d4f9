"""A site that `site init` writes on a real Slurm, and the verdict of its test job."""

import json

import pytest

from steelyard.launch import sites
from tests.cluster.conftest import Yard, everything

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]


def test_a_cluster_is_described_and_a_job_tries_the_description(yard: Yard):
    words = ("site", "init", "--sites", "new.toml", "--partition", "a100", "--json")
    reported = json.loads(yard.steelyard(*words, "--no-gpus").stdout)
    job = reported["test"]
    assert (reported["site"], job["works"], job["state"]) == ("yard", True, "finished"), job
    assert job["facts"]["host"] in ("b1", "b2")
    # The nodes only pretend to have GPUs, which the verdict of a job that asks for one must say.
    reported = json.loads(yard.steelyard(*words, "--name", "with-gpus", code=1).stdout)
    job = reported["test"]
    assert job["works"] is False, everything(yard.path / job["run"])
    assert "Slurm granted 1 GPU, but torch" in job["verdict"]
    name, site = sites.find(None, None, yard.path / "new.toml")
    assert (name, site.slurm.partition, site.slurm.gres) == ("yard", "a100", None)
    _, site = sites.find("with-gpus", None, yard.path / "new.toml")
    assert (site.slurm.gres, site.ranks_per_node, site.slurm.cpus_per_rank) == ("gpu:a100:4", 4, 2)
    launch = json.loads((yard.path / "runs" / "site-test-2" / "launch.json").read_text())
    assert (launch["site"], launch["partitions"]) == ("with-gpus", ["a100"])
