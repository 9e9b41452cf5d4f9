"""How nodes meet, and what several jobs of one run do about each other."""

import json
import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from steelyard.core.recipe.site_section import SiteSection, SlurmSection
from steelyard.launch import rendezvous_file
from steelyard.launch.backends import slurm_script
from steelyard.launch.job_spec import NodeGroup
from steelyard.parallel import port_discovery
from tests import preloaded
from tests.launch.test_submit import order

pytestmark = pytest.mark.timeout(60)


def test_a_master_meets_the_follower_that_is_there_and_not_one_of_the_past(tmp_path: Path, monkeypatch):
    """A follower lost its power: its file is still there. So is the rendezvous of the master's last attempt."""
    monkeypatch.setattr(rendezvous_file, "SECONDS_BETWEEN_LOOKS", 0.01)
    monkeypatch.setattr(rendezvous_file, "SECONDS_BETWEEN_LOOKS_OF_FOLLOWERS", 0.01)
    folder = tmp_path / "launch"
    folder.mkdir()
    (folder / "arrived-1.json").write_text('{"attempt": "8.0"}')
    (folder / "rendezvous.json").write_text('{"attempt": "7.0", "address": "gone", "followers": ["8.0"]}')
    asked: list[int] = []
    with ExitStack() as stack, ThreadPoolExecutor() as pool:
        master = pool.submit(rendezvous_file.join, tmp_path, "7.1", 0, 0, 1, asked, stack)
        time.sleep(0.2)
        assert not master.done()
        follower = pool.submit(rendezvous_file.join, tmp_path, "8.1", 2, 1, 1, asked, stack)
        where = master.result(timeout=150)
        assert where is not None
        assert where[1] == "7.1"
        assert follower.result(timeout=150) == where
        assert (folder / "met-8.1").read_text() == (folder / "met-7.1").read_text() == "7.1\n8.1\n"
        (folder / "arrived-1.json").unlink(missing_ok=True)


MEET = """
import os, torch, torch.distributed as dist
from steelyard.parallel.world import init_distributed
assert "MASTER_PORT" not in os.environ
with init_distributed("cpu", 1) as world:
    total = torch.tensor(world.rank + 1)
    dist.all_reduce(total)
    print(f"{world.launcher} {world.rank} {int(total)}")
"""


@pytest.mark.slow
def test_ranks_of_a_job_meet_without_a_port_that_was_chosen_before(tmp_path: Path):
    """Somebody sits on the first door of the job, and an outer launcher has set a port that is taken."""
    (tmp_path / "logs").mkdir()
    with (
        socket.create_server(("", port_discovery.ports_of(f"{tmp_path} 7.0")[0])),
        socket.create_server(("", 0)) as taken,
    ):
        words = [
            "-m",
            "steelyard.launch.node_agent",
            "--run",
            str(tmp_path),
            "--groups",
            "1x2",
            "--attempt",
            "7.0",
            "--",
        ]
        given = {"PYTHONPATH": str(Path(__file__).parents[2]), "MASTER_PORT": str(taken.getsockname()[1])}
        done = preloaded.run(
            [sys.executable, *words, sys.executable, "-c", MEET],
            env=os.environ | given,
            capture_output=True,
            timeout=150,
        )
    assert done.returncode == 0, done.stderr
    [said] = (tmp_path / "logs").glob("*.out")
    assert sorted(said.read_text().splitlines()) == ["torchrun 0 3", "torchrun 1 3"]


# In the place of Slurm's: this is job 7 in its first attempt, which met the first attempt of job 8.
PROGRAMS = {
    "squeue": """case "$*" in
        *--jobs=7*) echo RUNNING ;;
        *restartcnt*) printf "%-24s%-12s\\n" $(cat other) ;;
        *) cut -d" " -f1 other ;;
        esac""",
    "scontrol": """[ "$1" = requeue ] && echo "$@" >requeued; echo "SlurmdTimeout           = 40 sec" """,
    "sleep": "exec /bin/sleep 0.02",
}


@pytest.mark.parametrize(
    ("srun", "other", "code", "requeued"),
    [
        ("trap 'exit 143' TERM; while :; do /bin/sleep 0.02; done", "PENDING 1", 130, True),
        ("trap 'exit 143' TERM; while :; do /bin/sleep 0.02; done", "RUNNING 1", 130, True),
        ("trap 'exit 143' TERM; while :; do /bin/sleep 0.02; done", "NODE_FAIL 0", 1, False),
        ("touch launch/lost-7.0; exit 1", "PENDING 1", 130, True),
        ("touch launch/lost-7.0; exit 1", "FAILED 0", 1, False),
        ("touch launch/lost-7.0; exit 1", "RUNNING 0", 1, False),
        ("touch launch/lost-7.0 launch/failed-7.0; exit 1", "PENDING 1", 1, False),
        ("touch launch/failed-7.0; exit 130", "RUNNING 0", 1, False),
        ("/bin/sleep 0.3; exit 0", "RUNNING 0", 0, False),
    ],
    ids=["its job queued again", "it began again", "its job over", "ranks lost and its job queued again",
         "ranks lost and its job failed", "ranks lost and nothing known", "own ranks failed",
         "own ranks failed and others were stopped for it", "all well"],
)  # fmt: skip
def test_a_job_follows_what_becomes_of_the_other_job_of_its_run(tmp_path: Path, srun, other, code, requeued):
    (tmp_path / "launch").mkdir()
    (tmp_path / "launch" / "jobs").write_text("7\n8\n")
    (tmp_path / "launch" / "met-7.0").write_text("7.0\n8.0\n")
    (tmp_path / "other").write_text(other)
    for name, text in (PROGRAMS | {"srun": srun}).items():
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    two = order(
        tmp_path,
        SiteSection(slurm=SlurmSection(heterogeneous="several-jobs")),
        groups=[NodeGroup(1, 1), NodeGroup(1, 2)],
    )
    given = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    done = subprocess.run(
        ["bash", "-c", slurm_script.text(two, 0)], env=given, cwd=tmp_path, capture_output=True, text=True, timeout=150
    )
    assert (done.returncode, (tmp_path / "requeued").exists()) == (code, requeued), done.stdout + done.stderr


@pytest.mark.parametrize(("srun", "code"), [("exit 130", 130), ("touch launch/lost-7.0; exit 130", 1)])
def test_a_job_is_requeued_if_it_was_stopped_and_not_if_a_node_failed(tmp_path: Path, srun, code):
    """srun ends the other nodes when one fails. Their exit code is that of a stop."""
    (tmp_path / "launch").mkdir()
    for name, text in (PROGRAMS | {"srun": srun}).items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    given = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    text = slurm_script.text(order(tmp_path, groups=[NodeGroup(2, 1)]))
    done = subprocess.run(["bash", "-c", text], env=given, cwd=tmp_path, capture_output=True, text=True, timeout=150)
    assert (done.returncode, (tmp_path / "requeued").exists()) == (code, code == 130), done.stdout + done.stderr


def test_before_they_met_a_job_waits_for_one_in_the_queue(tmp_path: Path):
    text = slurm_script.text(
        order(
            tmp_path,
            SiteSection(slurm=SlurmSection(heterogeneous="several-jobs")),
            groups=[NodeGroup(1, 1), NodeGroup(1, 2)],
        ),
        0,
    )
    (tmp_path / "launch").mkdir()
    (tmp_path / "launch" / "jobs").write_text("7\n8\n")
    functions = text.split("attempt=$SLURM_JOB_ID")[0].partition("how_others_are")[2]
    (tmp_path / "squeue").write_text("#!/bin/bash\necho PENDING 0\n")
    (tmp_path / "squeue").chmod(0o755)
    given = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "attempt": "7.0"}
    for met, said in ((None, ""), ("7.0\n8.0\n", "again\n")):
        if met:
            (tmp_path / "launch" / "met-7.0").write_text(met)
        words = ["bash", "-c", f"how_others_are{functions}how_others_are"]
        assert preloaded.run(words, env=given, capture_output=True, text=True, timeout=150).stdout == said


def test_a_node_leaves_word_whether_its_ranks_failed_by_themselves(tmp_path: Path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "launch").mkdir()
    words = '{"kind": "LostPeer", "message": "lost another rank", "exit_code": 1, "time": 1.0, "lost_peer": %s}'
    for number, lost in enumerate(("true", "false")):
        attempt = f"7.{number}"
        (tmp_path / "launch" / "rendezvous.json").write_text(
            json.dumps({"attempt": "6.0", "address": "x", "followers": [attempt]})
        )
        rank = f"import os, sys; open(os.environ['STEELYARD_ERROR_FILE'], 'w').write('{words % lost}'); sys.exit(1)"
        line = ["-m", "steelyard.launch.node_agent", "--run", str(tmp_path), "--groups", "1x1,1x1", "--group", "1"]
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
        preloaded.run(
            [sys.executable, *line, "--attempt", attempt, "--", sys.executable, "-c", rank],
            env=environment, capture_output=True, timeout=150,
        )  # fmt: skip
    assert (tmp_path / "launch" / "lost-7.0").exists()
    assert (tmp_path / "launch" / "failed-7.1").exists()
    assert not (tmp_path / "launch" / "failed-7.0").exists()
