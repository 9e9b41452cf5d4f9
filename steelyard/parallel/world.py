"""The rank of this process in a job, and the start and end of `torch.distributed`.

Four ways to start ranks are supported: torchrun (and `--nproc`, which sets the same variables), mpirun, srun, and a
single process. They are checked in this order, because a process also sees the variables of an outer launcher: under
mpirun inside a Slurm job SLURM_PROCID is 0 on all ranks. A shell in a job (`srun --pty`, a batch script) is not a rank.

Torch is imported only when the process group is created, so that the command line can find its rank at no cost.
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
# Slurm numbers its own steps (batch script, interactive shell) from here; steps of srun start at 0.
SLURM_OWN_STEPS = 0xFFFFFFF0
DESTROY_TIMEOUT_S = 5.0
LOST_PEER_DELAY_S = 1.0  # mpirun and torchrun report the rank that exits first: that should be the one with the cause


@dataclass(frozen=True)
class World:
    """The rank of this process and the size of the job."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    launcher: Launcher = "alone"

    @property
    def is_rank0(self) -> bool:
        """Whether this is the rank that prints and writes files for all."""
        return self.rank == 0


class LostPeer(RuntimeFailure):
    """Another rank exited or stopped responding. This is a consequence of an error, never the cause."""


def detect(environ: Mapping[str, str]) -> World:
    """Read the rank from the environment variables of the launcher."""
    if "RANK" in environ:
        return _world("torchrun", environ, TORCHRUN)
    if "OMPI_COMM_WORLD_RANK" in environ:
        return _world("mpirun", environ, OPEN_MPI)
    in_step = _in_slurm_step(environ)
    if "PMI_RANK" in environ and ("MPI_LOCALRANKID" in environ or not in_step):  # srun sets PMI_RANK too.
        return _world("mpirun", environ, OTHER_MPI)
    if in_step:
        if "SLURM_GTIDS" not in environ:
            raise _half_set("srun", "SLURM_GTIDS", "SLURM_STEP_ID")
        return _world("srun", environ, SLURM, local_size=len(environ["SLURM_GTIDS"].split(",")))
    if environ.get("WORLD_SIZE", "1") != "1":
        raise _half_set("torchrun", "RANK", "WORLD_SIZE")
    return World()


def _in_slurm_step(environ: Mapping[str, str]) -> bool:
    """Whether srun started this process, rather than a shell in a job.

    Processes started from inside a step inherit its variables. A job submitted there sees a step that is not its own,
    and an srun there looks like `--pty`, except that its tasks have no terminal.
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
            raise UserError(f"{name} is {environ[name]!r}, which is not a number", hint=_hint(name))
        numbers.append(int(environ[name]))
    rank, size, local_rank = numbers[:3]
    local_size = numbers[3] if local_size is None else local_size
    if rank >= size:
        raise UserError(f"{names[0]} is {rank}, but {names[1]} is {size}: ranks start at 0", hint=_hint(names[0]))
    if not local_rank < local_size <= size:
        message = f"{names[2]} is {local_rank}, with {local_size} ranks on this machine and {size} in total"
        raise UserError(message, hint=_hint(names[2]))
    return World(rank, size, local_rank, local_size, launcher)


def _half_set(launcher: Launcher, missing: str, given: str) -> UserError:
    return UserError(f"{given} is set, as {launcher} does, but {missing} is not", hint=_hint(given))


def _hint(name: str) -> str:
    return f"start the ranks with --nproc, torchrun, mpirun or srun, or unset {name} to run a single process"


@contextmanager
def init_distributed(device_type: str, timeout_minutes: float) -> Iterator[World]:
    """Create the process group for the duration of the block; a single process initializes nothing.

    After an error the block does not wait for ranks that may have exited. An error caused by an exited rank becomes a
    `LostPeer`, which the launcher ranks behind all other errors.
    """
    world = detect(os.environ)
    if device_type == "cuda":
        _take_gpu(world)
    if world.size == 1:
        yield world
        return
    import torch.distributed as dist

    timeout = timedelta(minutes=timeout_minutes)
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # for flight records (training/watchdog.py)
    try:
        store = rendezvous.open_store(world.rank, world.size, world.local_size, world.launcher, timeout)
        backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.size, timeout=timeout)
        yield world
    except (Exception, Interrupted) as error:
        _destroy_after_error()
        if isinstance(error, RuntimeError) and _is_lost_peer(error):
            time.sleep(LOST_PEER_DELAY_S)
            raise LostPeer(f"lost another rank: {_summary(error)}") from error
        raise
    else:
        dist.destroy_process_group()


def _take_gpu(world: World) -> None:
    import torch

    visible = torch.cuda.device_count()
    bound_by_launcher = visible == 1 and "CUDA_VISIBLE_DEVICES" in os.environ
    if world.local_size > visible and not bound_by_launcher:
        raise UserError(
            f"{world.local_size} ranks were started on this machine, but {visible} GPUs are visible",
            hint="start as many ranks as there are GPUs, or set train.device=cpu",
        )
    torch.cuda.set_device(0 if bound_by_launcher else world.local_rank)


def _destroy_after_error() -> None:
    """Destroy the process group after an error, with a timeout: pending collectives may never complete."""
    import torch.distributed as dist

    def leave() -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    thread = threading.Thread(target=leave, daemon=True)
    thread.start()
    thread.join(DESTROY_TIMEOUT_S)


def _is_lost_peer(error: RuntimeError) -> bool:
    """Whether the error is one with which Gloo, NCCL or the store report a lost rank. All are RuntimeErrors."""
    text = str(error).lower()
    signs = (
        "connection closed by peer", "connection reset by peer", "connection refused", "broken pipe", "socket closed",
        "timed out", "timeout", "remote process exited", "failed to recv", "failed to send", "connectfullmesh",
    )  # fmt: skip
    return any(sign in text for sign in signs)


def _summary(error: BaseException) -> str:
    """The message of Gloo, without the source location and the advice."""
    return re.sub(r"^\[[^]]*\] *", "", str(error).strip()).splitlines()[0].split(". ")[0]


def run_on_rank0(world: World, function: Callable[[], T]) -> T:
    """Call the function on rank 0 and broadcast its result, or its error, to all ranks.

    The error is raised on every rank and marked `shared`, so that only rank 0 prints it.
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
            failure, answer[1] = error, _packed_error(error)
    broadcast_object_list(answer, src=0)
    if failure is not None:
        if isinstance(failure, SteelyardError):
            failure.shared = True
        raise failure
    if answer[1] is not None:
        raise _unpacked_error(answer[1])
    result: T = answer[0]
    return result


@contextmanager
def gather_errors(world: World) -> Iterator[None]:
    """Raise an error of any rank in the block on all ranks: each may read different parts of the same files.

    All ranks must enter the block, and nothing in it may wait for another rank.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    if world.size > 1:
        from torch.distributed import all_gather_object

        reported: list[Any] = [None] * world.size
        all_gather_object(reported, None if failure is None else _packed_error(failure))
        first = next((packed for packed in reported if packed is not None), None)
        # An error that is not a SteelyardError keeps its traceback on the rank that raises it.
        if first is not None and (failure is None or isinstance(failure, SteelyardError)):
            raise _unpacked_error(first) from failure
    if failure is not None:
        raise failure


def _unpacked_error(packed: tuple[str, str, str | None, str | None]) -> SteelyardError:
    """The error of another rank, marked as shared."""
    kind, message, where, hint = packed
    reported = (UserError if kind == "UserError" else RuntimeFailure)(message, where=where, hint=hint)
    reported.shared = True
    return reported


def _packed_error(error: Exception) -> tuple[str, str, str | None, str | None]:
    if isinstance(error, SteelyardError):
        kind = "UserError" if isinstance(error, UserError) else "RuntimeFailure"
        return kind, error.message, error.where, error.hint
    return "RuntimeFailure", f"{type(error).__name__}: {error}", None, None


@contextmanager
def raise_on_all_ranks(world: World) -> Iterator[None]:
    """Mark user errors in the block as shared: every rank reads the same recipe and raises the same error."""
    try:
        yield
    except UserError as error:
        error.shared = world.size > 1
        raise
