"""mpirun over the virtual hosts, started on one of them, without an sshd."""

import json
import shutil
from contextlib import suppress
from pathlib import Path

import pytest

from tests.cluster.conftest import OVER_MPI, Yard, everything, losses

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(900),
    pytest.mark.skipif(shutil.which("mpirun") is None, reason="mpirun is not installed"),
]


def words(yard: Yard) -> list[str]:
    sites = yard.path / "hosts.toml"
    sites.write_text(OVER_MPI.format(source=yard.environment["PYTHONPATH"], rsh=yard.lab.folder / "rsh"))
    where = ["--on", "mpi", "--sites", str(sites), "--site", "hosts", "--nodes", "2"]
    return ["alike.toml", "parallel.data=2", *where]


def test_mpirun_trains_over_hosts_and_leaves_the_same_folder(yard: Yard):
    run = yard.submit(*words(yard), "--name", "mpi", beside="a1")
    yard.lab.until((run / "launch" / "ended.json").exists, "the end", 120)
    ended = json.loads((run / "launch" / "ended.json").read_text())
    assert ended["state"] == "finished", (run / "logs" / "launcher.log").read_text()
    assert sorted(losses(run)) == list(range(1, 21))
    for host in ("a1", "b1"):
        samples = (run / "logs" / f"{host}.gpu").read_text().splitlines()
        assert json.loads(samples[-1])["devices"][0]["processes"]
    launch = json.loads((run / "launch.json").read_text())
    assert (launch["backend"], launch["nodes"], launch["process"]["host"]) == ("mpi", 2, "a1")


def test_a_cancelled_job_saves_on_all_hosts_and_one_ended_at_once_leaves_no_rank(yard: Yard):
    long = [*words(yard), "train.steps=100000", "--name", "mpi-cancelled"]
    run = yard.submit(*long, beside="a1")
    yard.until_step(run, 3)
    said = json.loads(yard.steelyard("cancel", str(run), "--json", beside="a1").stdout)
    assert said["state"] == "cancelled", everything(run)
    assert "saved step" in everything(run)
    saved = max(losses(run))
    yard.submit(*long, beside="a1")
    yard.until_step(run, saved + 3)
    yard.steelyard("cancel", str(run), "--now", beside="a1")
    yard.lab.until(lambda: not ranks(run), "all ranks to be gone", 240)


def ranks(run: Path) -> list[str]:
    """Processes of a run on any host."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if str(run).encode() in path.read_bytes().split(b"\0"):
                found.append(path.parent.name)
    return found
