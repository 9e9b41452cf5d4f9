"""Checkpoint folders.

    checkpoints/step-00000100/
        __<rank>_0.distcp         tensors, or the shards of them that a rank holds,
        .metadata                 in the layout of torch.distributed.checkpoint
        state.json                step and counters, and the SHA-256 of every other file (state_file.py)
    checkpoints/damaged/          checkpoints that did not match their checksums when the run was resumed

All ranks write to a folder with a temporary name, which rank 0 renames at the end. Tensors are written by torch,
everything else as JSON. A checkpoint can be loaded with any layout.

A folder whose files do not match their checksums is not loaded: `latest` reports it and uses the previous one.
If checkpoints exist and none can be loaded, that is an error: a run never restarts at step 0 while it has checkpoints.
An older checkpoint is deleted only after the new one was read back and matches its checksums.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from steelyard.checkpoint import state_file, step_folders
from steelyard.checkpoint.dcp_metadata import PortableWriter, SafeReader
from steelyard.checkpoint.finite import refuse_nonfinite
from steelyard.checkpoint.sharded_tensor import LazyTensor, ShardLoadPlanner, ShardSavePlanner, TensorShard
from steelyard.core import files
from steelyard.core.console import console
from steelyard.core.errors import CorruptFileError, RuntimeFailure, SteelyardError, UserError
from steelyard.core.run import MANIFEST, Run

STATE = state_file.NAME
TORCH_STREAM = "NoCloseWriter"  # The stream class of torch.distributed.checkpoint.


class CheckpointWriteError(RuntimeFailure):
    """torch could not write the checkpoint, usually because the disk is full."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    path: Path
    state: dict[str, Any]

    @property
    def step(self) -> int:
        """The step at which it was saved."""
        return int(self.state["step"])

    @property
    def run(self) -> Run:
        """The run it belongs to."""
        return Run.open(self.path.parent.parent)

    @cached_property
    def metadata(self) -> Metadata:
        """torch's metadata of the tensors."""
        return SafeReader(str(self.path)).read_metadata()

    def tensors(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """The shape and dtype of each tensor, by name."""
        return {
            name: (tuple(entry.size), entry.properties.dtype)
            for name, entry in self.metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each tensor, by name."""
        return {name: size for name, (size, _) in self.tensors().items()}


Tensors = Mapping[str, Tensor | TensorShard]
# For checkpoints of other programs: also tensors that are computed when they are written, and `[None]`.
Writable = Mapping[str, TensorShard | LazyTensor | list[None]]


def save(
    folder: Path, tensors: Tensors, state: dict[str, Any], keep_last: int, group: dist.ProcessGroup | None = None
) -> Path:
    """Save a checkpoint for `state["step"]` and remove all but the newest `keep_last` and the best.

    With a group this is a collective call, and each rank passes its shards. An error of one rank is raised on all.
    """
    path = step_folders.path_at(folder, state["step"])
    shards = {
        name: tensor if isinstance(tensor, TensorShard) else TensorShard.whole(tensor)
        for name, tensor in tensors.items()
    }
    if group is None:
        with unfinished_folder(path) as unfinished:
            mine = write_shards(shards, unfinished, path, None)
            _finish(unfinished, state, mine)
    elif dist.get_rank(group) == 0:
        with unfinished_folder(path) as unfinished:
            dist.broadcast_object_list([str(unfinished)], group_src=0, group=group)
            mine = write_shards(shards, unfinished, path, group)
            _finish(unfinished, state, _gathered(mine, group))
    else:
        name: list[Any] = [None]
        dist.broadcast_object_list(name, group_src=0, group=group)
        mine = write_shards(shards, Path(name[0]), path, group)
        _gathered(mine, group)
    _remove_old(folder, path, mine, keep_last, group)
    return path


def _remove_old(
    folder: Path, newest: Path, mine: dict[str, str], keep_last: int, group: dist.ProcessGroup | None
) -> None:
    """Delete old checkpoints after the newest was read back. Each rank reads the files that it wrote.

    An error that only prevents the deletion does not stop the run: the next save tries again.
    """
    old: list[Path] = []
    if group is None or dist.get_rank(group) == 0:
        try:
            old = step_folders.removable(folder, newest, keep_last)
        except SteelyardError as error:
            console.warn(f"old checkpoints are not removed: {error.message}")
    is_due = [bool(old)]
    if group is not None:
        dist.broadcast_object_list(is_due, group_src=0, group=group)
    if not is_due[0]:
        return
    wrong = _mismatched(newest, mine)
    if group is not None:
        wrong = list(_gathered(dict.fromkeys(wrong, ""), group))
    if wrong:
        raise RuntimeFailure(
            f"checkpoint {newest} does not read back as it was written: {wrong[0]} does not match its checksum",
            hint="check the disk and the memory of this machine; no older checkpoint was removed",
        )
    for path in old:
        shutil.rmtree(path, ignore_errors=True)


def _mismatched(path: Path, mine: dict[str, str]) -> list[str]:
    """The files of this rank whose checksum differs, read from disk if the system drops its page cache."""
    wrong = [name for name, expected in mine.items() if _checksum(path / name, from_disk=True) != expected]
    if ".metadata" in mine:  # Rank 0, which also wrote the state.
        try:
            state_file.read(path)
        except CorruptFileError:
            wrong.append(STATE)
    return wrong


@contextlib.contextmanager
def unfinished_folder(path: Path) -> Iterator[Path]:
    """A temporary folder that becomes the checkpoint at `path` when the block ends without an error."""
    if path.exists():  # From an earlier attempt of this run; the new checkpoint replaces it.
        shutil.rmtree(path)
    with files.atomic_folder(path) as folder:
        yield folder


def write_shards(
    shards: Writable,
    unfinished: Path,
    path: Path,
    group: dist.ProcessGroup | None,
    make_writer: Callable[..., PortableWriter] = PortableWriter,
) -> dict[str, str]:
    """Write this rank's shards and return the checksums of its files."""
    writer = make_writer(str(unfinished), single_file_per_rank=True)
    with _single_process(), _silenced_stream_errors():
        try:
            dcp.save(
                dict(shards),
                storage_writer=writer,
                planner=ShardSavePlanner(flatten_state_dict=False),
                process_group=group,
                no_dist=group is None,
            )
        except CheckpointException as error:
            reason = _reason(error)
            for cause in _causes(error):
                traceback.clear_frames(cause.__traceback__)
                if isinstance(cause, SteelyardError):  # A conversion failed while reading its source.
                    raise cause from None
            raise CheckpointWriteError(f"checkpoint {files.final(path.name)} could not be written: {reason}") from error
    rank = 0 if group is None else dist.get_rank(group)
    mine = [*unfinished.glob(f"__{rank}_*"), *([unfinished / ".metadata"] if rank == 0 else [])]
    return {file.name: _checksum(file) for file in sorted(mine)}


def _gathered(sums: dict[str, str], group: dist.ProcessGroup) -> dict[str, str]:
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, sums, group=group)
    return {name: checksum for each in gathered for name, checksum in each.items()}


def _finish(unfinished: Path, state: dict[str, Any], sums: dict[str, str]) -> None:
    state_file.write(unfinished, state, sums)


def fill(unfinished: Path, held: Writable, state: dict[str, Any] | None) -> None:
    """Write a checkpoint into a temporary folder; without a state it is not a checkpoint of Steelyard."""
    sums = write_shards(held, unfinished, unfinished, None)
    if state is not None:
        _finish(unfinished, state, sums)


def latest(folder: Path, set_aside: bool = False) -> Checkpoint | None:
    """The newest valid checkpoint of a run, or None if the run has no checkpoints.

    Damaged checkpoints are reported and skipped. With `set_aside`, which is for the process that writes the run, they
    are moved to `damaged/`. If all are damaged, this raises an error and moves none.
    """
    skipped: list[Path] = []
    for path in reversed(step_folders.by_age(folder)):
        try:
            checkpoint = _opened(path)
        except CorruptFileError as damage:
            console.warn(f"{damage.message}; trying the previous checkpoint")
            skipped.append(path)
            continue
        for damaged in skipped if set_aside else ():
            step_folders.move_aside(damaged)
        return checkpoint
    if skipped or step_folders.by_age(folder / step_folders.DAMAGED):
        raise step_folders.AllDamagedError(
            f"every checkpoint in {folder} is damaged",
            hint="restore one from a backup, or start from step 0 in a new folder with --resume never",
        )
    return None


def source(path: str | Path) -> Checkpoint:
    """The checkpoint at a path: a checkpoint folder, or a run folder, whose newest checkpoint is used."""
    path = Path(path)
    if (path / STATE).is_file():
        return _opened(path)
    if (path / MANIFEST).is_file():
        newest = latest(Run.open(path).checkpoints)
        if newest is None:
            raise UserError(f"{path} has no checkpoint yet")
        return newest
    raise UserError(f"{path} is neither a checkpoint nor a run folder", hint="pass a folder under runs/")


def load(checkpoint: Checkpoint, tensors: Tensors) -> None:
    """Load the tensors in place, without communication. Shapes are checked before anything is read.

    NaN and infinite values are an error that names the parameter, on the ranks that read them.
    """
    saved = checkpoint.shapes()
    shards = {
        name: tensor if isinstance(tensor, TensorShard) else TensorShard.whole(tensor)
        for name, tensor in tensors.items()
    }
    wrong = [
        f"{name}: {saved.get(name, 'missing')} in the checkpoint, {shard.shape} expected"
        for name, shard in shards.items()
        if saved.get(name) != shard.shape
    ]
    if wrong:
        raise UserError(f"{checkpoint.path} does not fit the model:\n  " + "\n  ".join(wrong[:10]))
    with _single_process():
        reader = SafeReader(str(checkpoint.path), checkpoint.metadata)
        try:
            dcp.load(dict(shards), storage_reader=reader, planner=ShardLoadPlanner(), no_dist=True)
        except CheckpointException as error:
            raise CorruptFileError(f"{checkpoint.path} cannot be read: {_reason(error)}") from error
    hint = "use an earlier checkpoint; to resume the run from the one before, move this folder away"
    refuse_nonfinite({name: shard.tensor for name, shard in shards.items()}, checkpoint.path, hint)


@contextlib.contextmanager
def _single_process() -> Iterator[None]:
    """Silence torch's warning that it assumes a single process, which it prints even with `no_dist`."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*assuming the intent is to (save|load) in a single process")
        yield


@contextlib.contextmanager
def _silenced_stream_errors() -> Iterator[None]:
    """Silence errors of streams at deallocation: torch flushes a failed stream again, and Python 3.13 prints the error.

    The frames of the first error reference the stream, so they must be cleared inside this context.
    """
    before = sys.unraisablehook

    def hook(raised: sys.UnraisableHookArgs) -> None:
        # Python 3.13 passes the stream, 3.14 names it in the message.
        if TORCH_STREAM not in f"{raised.err_msg} {type(raised.object).__name__}":
            before(raised)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = before


def _opened(path: Path) -> Checkpoint:
    state, sums = state_file.read(path)
    for name, expected in sums.items():
        file = path / name
        if state_file.retried(file, partial(_checksum, file)) != expected:
            raise state_file.damaged(path, f"{name} does not match its checksum")
    return Checkpoint(path, state)


def _reason(error: CheckpointException) -> str:
    """The cause of torch's error: the message of the operating system, if there is one."""
    causes = list(_causes(error))
    for cause in causes:
        if isinstance(cause, OSError):
            return str(cause.strerror or cause)
    return str(causes[0]) if causes else str(error)


def _causes(error: CheckpointException) -> Iterator[BaseException]:
    """The error of each rank, and the errors that caused it."""
    for failure, _ in error.failures.values():
        cause: BaseException | None = failure
        while cause is not None:
            yield cause
            cause = cause.__cause__ or cause.__context__


def _checksum(path: Path, from_disk: bool = False) -> str:
    with open(path, "rb") as file:
        if from_disk and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return hashlib.file_digest(file, "sha256").hexdigest()
