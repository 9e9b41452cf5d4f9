"""mpirun over the virtual hosts, started on one of them, without an sshd."""

import json
import shutil

import pytest

from tests.cluster.conftest import OVER_MPI, Yard, losses

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(240),
    pytest.mark.skipif(shutil.which("mpirun") is None, reason="mpirun is not installed"),
]


def test_mpirun_trains_over_hosts_and_leaves_the_same_folder(yard: Yard):
    sites = yard.path / "hosts.toml"
    sites.write_text(OVER_MPI.format(source=yard.environment["PYTHONPATH"], rsh=yard.lab.folder / "rsh"))
    words = ["alike.toml", "parallel.data=2", "--on", "mpi", "--sites", str(sites), "--site", "hosts"]
    run = yard.submit(*words, "--nodes", "2", "--name", "mpi", beside="a1")
    yard.lab.until((run / "launch" / "ended.json").exists, "the end", 120)
    ended = json.loads((run / "launch" / "ended.json").read_text())
    assert ended["state"] == "COMPLETED", (run / "logs" / "launcher.log").read_text()
    assert sorted(losses(run)) == list(range(1, 21))
    for host in ("a1", "b1"):
        samples = (run / "logs" / f"{host}.gpu").read_text().splitlines()
        assert json.loads(samples[-1])["devices"][0]["processes"]
    launch = json.loads((run / "launch.json").read_text())
    assert (launch["backend"], launch["nodes"], launch["process"]["host"]) == ("mpi", 2, "a1")
