"""Who a rank is under every launcher, and ranks that really meet."""

import os
import shutil
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest

from steelyard.core.errors import RuntimeFailure, UserError
from steelyard.parallel import port_discovery, rendezvous, world
from steelyard.parallel.world import World, detect, init_distributed, run_on_rank0
from tests import preloaded


def names(prefix: str, keys: str, values: str) -> dict[str, str]:
    return {prefix + key: value for key, value in zip(keys.split(), values.split(), strict=True)}


TORCHRUN = names("", "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE", "5 8 1 4")
OPEN_MPI = names("OMPI_COMM_WORLD_", "RANK SIZE LOCAL_RANK LOCAL_SIZE", "5 8 1 4")
HYDRA = names("", "PMI_RANK PMI_SIZE MPI_LOCALRANKID MPI_LOCALNRANKS", "5 8 1 4")
# As Slurm 22.05 was seen to set them.
BATCH = names("SLURM_", "JOB_ID PROCID NTASKS LOCALID GTIDS JOB_NODELIST", "7 0 8 0 0 a[1-2]") | {
    "SLURMD_NODENAME": "a1"
}
STEP = BATCH | names(
    "SLURM_", "PROCID LOCALID GTIDS STEP_ID STEP_NUM_TASKS STEP_NODELIST", "5 1 4,5,6,7 0 8 a[1-2]"
)  # fmt: skip
PTY = STEP | names("SLURM_", "PROCID LOCALID GTIDS PTY_PORT TASK_PID", "0 0 0,1,2,3 41013 1")
BATCH_FROM_STEP = BATCH | names("SLURM_", "STEP_ID STEP_NUM_TASKS STEP_NODELIST PTY_PORT", "0 2 a1 41013")


def placed(launcher: str) -> World:
    return World(rank=5, size=8, local_rank=1, local_size=4, launcher=launcher)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, World()),
        ({"WORLD_SIZE": "1"}, World()),
        (TORCHRUN, placed("torchrun")),
        (OPEN_MPI, placed("mpirun")),
        (HYDRA, placed("mpirun")),
        (STEP, placed("srun")),
        (OPEN_MPI | BATCH, placed("mpirun")),
        (OPEN_MPI | STEP | {"SLURM_PROCID": "0"}, placed("mpirun")),
        (HYDRA | STEP | {"SLURM_PROCID": "0"}, placed("mpirun")),
        (TORCHRUN | STEP | {"SLURM_PROCID": "0"}, placed("torchrun")),
        (STEP | {"PMI_RANK": "5", "PMI_SIZE": "8"}, placed("srun")),
        (STEP | {"WORLD_SIZE": "8", "MASTER_ADDR": "a1"}, placed("srun")),
        (BATCH, World()),
        (BATCH_FROM_STEP, World()),
        (BATCH_FROM_STEP | {"SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NODELIST": "b1"}, World()),
        (BATCH | {"SLURM_STEP_ID": "4294967291"}, World()),
        (PTY, World()),
        (PTY | {"SLURM_STEP_ID": "4294967290"}, World()),
    ],
)
def test_a_rank_knows_its_place(monkeypatch, environ, expected):
    monkeypatch.setattr(world, "_has_terminal", lambda: True)
    assert detect(environ) == expected


def test_an_srun_inside_an_interactive_shell_is_a_launch(monkeypatch):
    monkeypatch.setattr(world, "_has_terminal", lambda: False)
    assert detect(STEP | {"SLURM_PTY_PORT": "41013"}) == placed("srun")
    monkeypatch.setattr(world, "_has_terminal", lambda: True)
    assert detect(STEP | {"SLURM_PTY_PORT": "41013", "SLURM_TASK_PID": str(os.getpid())}) == placed("srun")


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        ({"RANK": "0"}, "WORLD_SIZE"),
        ({"WORLD_SIZE": "4"}, "RANK"),
        (TORCHRUN | {"LOCAL_RANK": ""}, "LOCAL_RANK"),
        (TORCHRUN | {"RANK": "-1"}, "RANK"),
        (TORCHRUN | {"RANK": "two"}, "RANK"),
        (TORCHRUN | {"RANK": "8"}, "RANK"),
        (TORCHRUN | {"WORLD_SIZE": "0"}, "WORLD_SIZE"),
        (TORCHRUN | {"LOCAL_RANK": "4"}, "LOCAL_RANK"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "x"}, "OMPI_COMM_WORLD_SIZE"),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, "MPI_LOCALRANKID"),
        ({key: value for key, value in STEP.items() if key != "SLURM_GTIDS"}, "SLURM_GTIDS"),
    ],
)
def test_a_broken_variable_is_named(environ, name):
    with pytest.raises(UserError, match=name) as error:
        detect(environ)
    assert "unset" in str(error.value)


@pytest.mark.parametrize(
    ("nodes", "hosts"),
    [
        ("a1", ["a1"]),
        ("a[1-3,5],b2", ["a1", "a2", "a3", "a5", "b2"]),
        ("n[008-011]", ["n008", "n009", "n010", "n011"]),
        ("r[1-2]n[3,5]-ib,x", ["r1n3-ib", "r1n5-ib", "r2n3-ib", "r2n5-ib", "x"]),
    ],
)
def test_lists_of_hosts_are_read(nodes, hosts):
    assert rendezvous.expand(nodes) == hosts


@pytest.mark.parametrize("nodes", ["a[1-", "a[1-x]", "a[]"])
def test_broken_lists_of_hosts_are_refused(nodes):
    with pytest.raises(UserError, match="not a list of hosts"):
        rendezvous.expand(nodes)


def test_all_ranks_work_out_one_meeting_place_and_jobs_keep_apart():
    assert rendezvous.master(STEP, "srun", is_one_host=False) == ("a1", None)
    assert rendezvous.master(STEP, "srun", is_one_host=True) == ("127.0.0.1", None)
    given = {"MASTER_ADDR": "b1", "MASTER_PORT": "23456"}
    assert rendezvous.master(STEP | given, "srun", is_one_host=False) == ("b1", 23456)
    assert rendezvous.master({"PMIX_NAMESPACE": "1"}, "mpirun", is_one_host=True)[0] == "127.0.0.1"
    mine, other = (rendezvous.job(STEP | {"SLURM_STEP_ID": step}, "srun") for step in ("0", "1"))
    assert all(15000 <= door < 30000 for door in port_discovery.ports_of(mine))
    assert len(set(port_discovery.ports_of(mine))) == port_discovery.CANDIDATES
    assert port_discovery.ports_of(mine)[0] != port_discovery.ports_of(other)[0]


@pytest.mark.timeout(300)
def test_rank_0_takes_a_free_port_and_the_others_pass_strangers_by(monkeypatch):
    """The first door is a silent stranger's, the second a talkative one's: the third is opened."""
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("PMIX_NAMESPACE", f"job of {os.getpid()}")
    monkeypatch.setattr(port_discovery, "SECONDS_PER_PORT", 0.2)
    silent, talkative, *_ = port_discovery.ports_of(os.environ["PMIX_NAMESPACE"])
    with socket.create_server(("", silent)), socket.create_server(("", talkative)) as stranger:

        def talk():
            with suppress(OSError):
                while True:
                    guest, _ = stranger.accept()
                    guest.sendall(b"220 mail.example.org\r\n" * 20)

        threading.Thread(target=talk, daemon=True).start()
        with ThreadPoolExecutor() as pool:
            meeting = [
                pool.submit(rendezvous.open_store, rank, 3, 3, "mpirun", timedelta(seconds=30)) for rank in (1, 2, 0)
            ]
            stores = [each.result() for each in meeting]
        stores[0].set("said", "by 1")
        assert stores[2].get("said") == b"by 1"
        assert {store.port for store in stores} == {int(os.environ["MASTER_PORT"])}
        stranger.shutdown(socket.SHUT_RDWR)


def test_a_port_that_was_set_and_is_taken_is_named(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with socket.create_server(("", 0)) as taken:
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        with pytest.raises(RuntimeFailure, match="already in use"):
            rendezvous.open_store(0, 2, 2, "torchrun", timedelta(seconds=5))


@pytest.mark.parametrize(
    ("environ", "launcher", "is_one_host", "name"),
    [
        ({"PMIX_NAMESPACE": "1"}, "mpirun", False, "MASTER_ADDR"),
        ({"PMIX_NAMESPACE": "1", "SLURM_JOB_NODELIST": "a1"}, "mpirun", False, "MASTER_ADDR"),
        ({}, "mpirun", True, "MASTER_PORT"),
        ({}, "torchrun", True, "MASTER_ADDR"),
        ({"MASTER_ADDR": "a", "MASTER_PORT": "70000"}, "torchrun", True, "MASTER_PORT"),
    ],
)
def test_ranks_that_cannot_meet_are_told_what_to_set(environ, launcher, is_one_host, name):
    with pytest.raises(UserError, match=name):
        rendezvous.master(environ, launcher, is_one_host)


def test_a_process_that_is_alone_initialises_nothing(monkeypatch):
    for name in [name for name in os.environ if name in TORCHRUN or name.startswith(("SLURM", "OMPI", "PMI"))]:
        monkeypatch.delenv(name)
    before = dict(os.environ)
    with init_distributed("cpu", 1) as alone:
        import torch.distributed as dist

        assert not dist.is_initialized()
        assert run_on_rank0(alone, lambda: 7) == 7
    assert (alone, dict(os.environ)) == (World(), before)


MEET = """
import os, signal, socket, time, torch, torch.distributed as dist
from steelyard.core.errors import UserError
from steelyard.parallel import port_discovery, rendezvous
from steelyard.parallel.world import init_distributed, run_on_rank0
from steelyard.training.graceful_stop import stop_request

def wrong():
    raise UserError("wrong", where="here")

if os.environ.get("OMPI_COMM_WORLD_RANK") == "0":  # A stranger is at the first door.
    stranger = socket.create_server(("", port_discovery.ports_of(rendezvous.job(os.environ, "mpirun"))[0]))

with init_distributed("cpu", 1) as world, stop_request() as stop:
    total = torch.tensor(world.rank + 1)
    dist.all_reduce(total)
    assert not stop.agreed()
    if world.rank == world.size - 1:
        os.kill(os.getpid(), signal.SIGUSR1)
    assert stop.agreed()
    first = run_on_rank0(world, os.getpid)
    assert (first == os.getpid()) == world.is_rank0
    try:
        run_on_rank0(world, wrong)
    except UserError as error:
        assert error.shared and str(error) == "here: wrong"
        os.write(1, f"{world.launcher} {world.rank}/{world.size} {int(total)}\\n".encode())
assert not dist.is_initialized()
"""


def meet(folder: Path, *launcher: str) -> list[str]:
    """What two ranks of a real launcher say."""
    (folder / "meet.py").write_text(MEET)
    command = [*launcher, sys.executable, str(folder / "meet.py")]
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    paths = {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]))
    }
    done = preloaded.run(command, capture_output=True, text=True, timeout=600, env=os.environ | root | paths)
    assert done.returncode == 0, done.stderr
    return sorted(done.stdout.splitlines())


@pytest.mark.slow
def test_ranks_of_torchrun_meet(tmp_path):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python"]
    assert meet(tmp_path, *launcher) == ["torchrun 0/2 3", "torchrun 1/2 3"]


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("mpirun"), reason="there is no mpirun here")
def test_ranks_of_mpirun_meet_though_a_port_is_taken(tmp_path):
    assert meet(tmp_path, "mpirun", "-n", "2", "--oversubscribe") == ["mpirun 0/2 3", "mpirun 1/2 3"]


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("srun"), reason="there is no srun here")
def test_ranks_of_srun_on_two_nodes_meet(tmp_path):
    if subprocess.run(["sinfo"], capture_output=True, timeout=150).returncode:
        pytest.skip("no Slurm answers here")
    assert meet(tmp_path, "srun", "-N2", "-n2") == ["srun 0/2 3", "srun 1/2 3"]
