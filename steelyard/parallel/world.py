"""Who this process is among the ranks of a job, and how the ranks meet and part.

Four launchers are understood: torchrun (and `--nproc`, which speaks its language), mpirun, srun, and none at all. They
are asked in this order, because the environment of an outer launcher shines through: under mpirun inside a Slurm job
SLURM_PROCID is 0 everywhere. A shell inside a job (`srun --pty`, a batch script) is no launch.

Torch is imported only where ranks meet, so that the command line can ask for its rank for free.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, TypeVar

from steelyard.core.errors import Interrupted, RuntimeFailure, SteelyardError, UserError
from steelyard.parallel import rendezvous

Launcher = Literal["alone", "torchrun", "mpirun", "srun"]
T = TypeVar("T")

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
OPEN_MPI = tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
OTHER_MPI = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
SLURM = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")
# Slurm numbers its own steps (batch script, interactive shell) from here; those that srun starts begin at 0.
SLURM_OWN_STEPS = 0xFFFFFFF0
SECONDS_TO_PART = 5.0
SECONDS_TO_LET_SPEAK = 1.0  # mpirun and torchrun name whoever ends first: let it be the rank that failed by itself


@dataclass(frozen=True)
class World:
    """One rank's place in the job."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    launcher: Launcher = "alone"

    @property
    def is_rank0(self) -> bool:
        """Whether this is the rank that speaks and writes for all."""
        return self.rank == 0


class LostPeer(RuntimeFailure):
    """Another rank went away or stopped answering. It is the consequence of an error, never the cause."""


def detect(environ: Mapping[str, str]) -> World:
    """Read the launcher's variables."""
    if "RANK" in environ:
        return _world("torchrun", environ, TORCHRUN)
    if "OMPI_COMM_WORLD_RANK" in environ:
        return _world("mpirun", environ, OPEN_MPI)
    in_step = _in_slurm_step(environ)
    if "PMI_RANK" in environ and ("MPI_LOCALRANKID" in environ or not in_step):  # srun speaks PMI too.
        return _world("mpirun", environ, OTHER_MPI)
    if in_step:
        if "SLURM_GTIDS" not in environ:
            raise _half_set("srun", "SLURM_GTIDS", "SLURM_STEP_ID")
        return _world("srun", environ, SLURM, local_size=len(environ["SLURM_GTIDS"].split(",")))
    if environ.get("WORLD_SIZE", "1") != "1":
        raise _half_set("torchrun", "RANK", "WORLD_SIZE")
    return World()


def _in_slurm_step(environ: Mapping[str, str]) -> bool:
    """Whether srun started this process, and not a shell in a job.

    Slurm hands the variables of a step on to what is started from inside it: a job submitted there sees a step that is
    not its own, and an srun there looks like `--pty`, except that its tasks have no terminal.
    """
    step = environ.get("SLURM_STEP_ID", "")
    if not step.isdigit() or int(step) >= SLURM_OWN_STEPS:
        return False
    if environ.get("SLURM_STEP_NUM_TASKS") not in (None, environ.get("SLURM_NTASKS")):
        return False
    nodes, node = environ.get("SLURM_STEP_NODELIST"), environ.get("SLURMD_NODENAME")
    if nodes and node and node not in rendezvous.expand(nodes):
        return False
    is_task_itself = environ.get("SLURM_TASK_PID") == str(os.getpid())
    return "SLURM_PTY_PORT" not in environ or is_task_itself or not _has_terminal()


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True


def _world(
    launcher: Launcher, environ: Mapping[str, str], names: tuple[str, ...], local_size: int | None = None
) -> World:
    numbers = []
    for name in names:
        if name not in environ:
            raise _half_set(launcher, name, names[0])
        if not environ[name].isascii() or not environ[name].isdigit():
            raise UserError(f"{name} is {environ[name]!r}, which is no number", hint=_hint(name))
        numbers.append(int(environ[name]))
    rank, size, local_rank = numbers[:3]
    local_size = numbers[3] if local_size is None else local_size
    if rank >= size:
        raise UserError(f"{names[0]} is {rank}, but {names[1]} is {size}: ranks count from 0", hint=_hint(names[0]))
    if not local_rank < local_size <= size:
        message = f"{names[2]} is {local_rank}, of {local_size} ranks on this machine and {size} in all"
        raise UserError(message, hint=_hint(names[2]))
    return World(rank, size, local_rank, local_size, launcher)


def _half_set(launcher: Launcher, missing: str, given: str) -> UserError:
    return UserError(f"{given} is set as by {launcher}, but {missing} is not", hint=_hint(given))


def _hint(name: str) -> str:
    return f"start the ranks with --nproc, torchrun, mpirun or srun, or unset {name} to be alone"


@contextmanager
def init_distributed(device_type: str, timeout_minutes: float) -> Iterator[World]:
    """Meet the other ranks for the length of the block; a process that is alone initialises nothing.

    After an error the block ends without waiting for ranks that may be gone, and an error that only says so becomes a
    `LostPeer`, which the launcher ranks behind every other.
    """
    world = detect(os.environ)
    if device_type == "cuda":
        _take_gpu(world)
    if world.size == 1:
        yield world
        return
    import torch.distributed as dist

    timeout = timedelta(minutes=timeout_minutes)
    try:
        store = rendezvous.meet(world.rank, world.size, world.local_size, world.launcher, timeout)
        backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.size, timeout=timeout)
        yield world
    except (Exception, Interrupted) as error:
        _part_in_haste()
        if isinstance(error, RuntimeError) and _is_lost_peer(error):
            time.sleep(SECONDS_TO_LET_SPEAK)
            raise LostPeer(f"lost another rank: {_gist(error)}") from error
        raise
    else:
        dist.destroy_process_group()


def _take_gpu(world: World) -> None:
    import torch

    visible = torch.cuda.device_count()
    bound_by_launcher = visible == 1 and "CUDA_VISIBLE_DEVICES" in os.environ
    if world.local_size > visible and not bound_by_launcher:
        raise UserError(
            f"{world.local_size} ranks were started on this machine, which shows {visible} GPUs",
            hint="start as many ranks as there are GPUs, or set train.device=cpu",
        )
    torch.cuda.set_device(0 if bound_by_launcher else world.local_rank)


def _part_in_haste() -> None:
    """Leave the group after an error, when what it still waits for may never come."""
    import torch.distributed as dist

    def leave() -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    thread = threading.Thread(target=leave, daemon=True)
    thread.start()
    thread.join(SECONDS_TO_PART)


def _is_lost_peer(error: RuntimeError) -> bool:
    """Gloo, NCCL and the store say it in their own words, as plain RuntimeErrors or subclasses of them."""
    text = str(error).lower()
    signs = (
        "connection closed by peer", "connection reset by peer", "connection refused", "broken pipe", "socket closed",
        "timed out", "timeout", "remote process exited", "failed to recv", "failed to send", "connectfullmesh",
    )  # fmt: skip
    return any(sign in text for sign in signs)


def _gist(error: BaseException) -> str:
    """What Gloo says, without where in its source and its advice."""
    return re.sub(r"^\[[^]]*\] *", "", str(error).strip()).splitlines()[0].split(". ")[0]


def run_on_rank0(world: World, function: Callable[[], T]) -> T:
    """Call the function on rank 0 and hand its result, or its error, to all ranks.

    The error is raised on every rank and marked `shared`, so that rank 0 tells it and the others end in silence.
    """
    if world.size == 1:
        return function()
    from torch.distributed import broadcast_object_list

    answer: list[Any] = [None, None]
    failure: Exception | None = None
    if world.is_rank0:
        try:
            answer[0] = function()
        except Exception as error:
            failure, answer[1] = error, _in_words(error)
    broadcast_object_list(answer, src=0)
    if failure is not None:
        if isinstance(failure, SteelyardError):
            failure.shared = True
        raise failure
    if answer[1] is not None:
        raise _from_words(answer[1])
    result: T = answer[0]
    return result


@contextmanager
def gather_errors(world: World) -> Iterator[None]:
    """Raise on all ranks what any of them raises in the block: each may read another part of the same files.

    All ranks enter the block, and nothing in it waits for another rank.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    if world.size > 1:
        from torch.distributed import all_gather_object

        reported: list[Any] = [None] * world.size
        all_gather_object(reported, None if failure is None else _in_words(failure))
        first = next((words for words in reported if words is not None), None)
        # An error that is not for users keeps its traceback on the rank that raises it.
        if first is not None and (failure is None or isinstance(failure, SteelyardError)):
            raise _from_words(first) from failure
    if failure is not None:
        raise failure


def _from_words(words: tuple[str, str, str | None, str | None]) -> SteelyardError:
    """The error of another rank, marked as shared."""
    kind, message, where, hint = words
    reported = (UserError if kind == "UserError" else RuntimeFailure)(message, where=where, hint=hint)
    reported.shared = True
    return reported


def _in_words(error: Exception) -> tuple[str, str, str | None, str | None]:
    if isinstance(error, SteelyardError):
        kind = "UserError" if isinstance(error, UserError) else "RuntimeFailure"
        return kind, error.message, error.where, error.hint
    return "RuntimeFailure", f"{type(error).__name__}: {error}", None, None


@contextmanager
def raise_on_all_ranks(world: World) -> Iterator[None]:
    """Mark mistakes in the block as shared: every rank reads the same recipe and finds the same mistake in it."""
    try:
        yield
    except UserError as error:
        error.shared = world.size > 1
        raise
