"""Checkpoint folders.

    checkpoints/step-00000100/
        __<rank>_0.distcp         tensors by name, or the parts of them that a rank held,
        .metadata                 as torch.distributed.checkpoint lays them out
        state.json                step and counters, and the SHA-256 of every other file (state_file.py)
    checkpoints/damaged/          checkpoints that did not match their checksums when the run was resumed

The folder is filled under a temporary name by all ranks together, and renamed by the first. Only tensors go through
torch; everything else is JSON. What was saved on one layout can be loaded on any other.

A folder whose files do not match their checksums is not loaded: `latest` reports it and falls back to the one before.
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
from collections.abc import Iterator, Mapping
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
from steelyard.checkpoint.sharded_tensor import Promised, ReadingPieces, TensorShard, WritingPieces
from steelyard.core import files
from steelyard.core.console import console
from steelyard.core.errors import CorruptFileError, RuntimeFailure, SteelyardError, UserError
from steelyard.core.run import MANIFEST, Run

STATE = state_file.NAME
TORCH_STREAM = "NoCloseWriter"  # What torch.distributed.checkpoint writes a file through.


class NotWritten(RuntimeFailure):
    """What torch could not write, mostly for want of room."""


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint on disk."""

    path: Path
    state: dict[str, Any]

    @property
    def step(self) -> int:
        """Steps done when it was saved."""
        return int(self.state["step"])

    @property
    def run(self) -> Run:
        """The run it belongs to."""
        return Run.open(self.path.parent.parent)

    @cached_property
    def metadata(self) -> Metadata:
        """What torch wrote down about the tensors inside."""
        return SafeReader(str(self.path)).read_metadata()

    def tensors(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """The tensors inside, by name: their sizes and dtypes."""
        return {
            name: (tuple(entry.size), entry.properties.dtype)
            for name, entry in self.metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The sizes of the tensors inside, by name."""
        return {name: size for name, (size, _) in self.tensors().items()}


Tensors = Mapping[str, Tensor | TensorShard]
# What a writer of other programs' checkpoints has beside pieces: tensors it has yet to make, and nothing, in a list.
Holdings = Mapping[str, TensorShard | Promised | list[None]]


def save(
    folder: Path, tensors: Tensors, state: dict[str, Any], keep_last: int, group: dist.ProcessGroup | None = None
) -> Path:
    """Save a checkpoint for `state["step"]` and remove all but the newest `keep_last` and the best.

    With a group, all its ranks call this together, each with the pieces it holds. Whatever stops one of them is raised
    on all.
    """
    path = step_folders.path_at(folder, state["step"])
    pieces = {
        name: tensor if isinstance(tensor, TensorShard) else TensorShard.whole(tensor)
        for name, tensor in tensors.items()
    }
    if group is None:
        with _unfinished(path) as unfinished:
            mine = _written(pieces, unfinished, path, None)
            _finish(unfinished, state, mine)
    elif dist.get_rank(group) == 0:
        with _unfinished(path) as unfinished:
            dist.broadcast_object_list([str(unfinished)], group_src=0, group=group)
            mine = _written(pieces, unfinished, path, group)
            _finish(unfinished, state, _gathered(mine, group))
    else:
        name: list[Any] = [None]
        dist.broadcast_object_list(name, group_src=0, group=group)
        mine = _written(pieces, Path(name[0]), path, group)
        _gathered(mine, group)
    _remove_old(folder, path, mine, keep_last, group)
    return path


def _remove_old(
    folder: Path, newest: Path, mine: dict[str, str], keep_last: int, group: dist.ProcessGroup | None
) -> None:
    """Delete old checkpoints after the newest was read back: each rank reads the files that it wrote.

    What hinders deleting alone does not end the run: the next save tries again.
    """
    old: list[Path] = []
    if group is None or dist.get_rank(group) == 0:
        try:
            old = step_folders.removable(folder, newest, keep_last)
        except SteelyardError as error:
            console.warn(f"no old checkpoint is removed: {error.message}")
    is_due = [bool(old)]
    if group is not None:
        dist.broadcast_object_list(is_due, group_src=0, group=group)
    if not is_due[0]:
        return
    wrong = _not_as_written(newest, mine)
    if group is not None:
        wrong = list(_gathered(dict.fromkeys(wrong, ""), group))
    if wrong:
        raise RuntimeFailure(
            f"checkpoint {newest} is not what was written to it: {wrong[0]} does not match its checksum",
            hint="check the disk and the memory of this machine; no older checkpoint was removed",
        )
    for path in old:
        shutil.rmtree(path, ignore_errors=True)


def _not_as_written(path: Path, mine: dict[str, str]) -> list[str]:
    """The files of this rank that read back otherwise, from the disk where the system lets go of its copy."""
    wrong = [name for name, expected in mine.items() if _checksum(path / name, from_disk=True) != expected]
    if ".metadata" in mine:  # The first rank's, which wrote the state too.
        try:
            state_file.read(path)
        except CorruptFileError:
            wrong.append(STATE)
    return wrong


@contextlib.contextmanager
def _unfinished(path: Path) -> Iterator[Path]:
    if path.exists():  # Left by an earlier life of this run: what is about to be written replaces it.
        shutil.rmtree(path)
    with files.atomic_folder(path) as folder:
        yield folder


def _written(pieces: Holdings, unfinished: Path, path: Path, group: dist.ProcessGroup | None) -> dict[str, str]:
    """Write this rank's pieces and return the checksums of its files."""
    writer = PortableWriter(str(unfinished), single_file_per_rank=True)
    with _single_process(), _failed_streams_are_quiet():
        try:
            dcp.save(
                dict(pieces),
                storage_writer=writer,
                planner=WritingPieces(flatten_state_dict=False),
                process_group=group,
                no_dist=group is None,
            )
        except CheckpointException as error:
            reason = _reason(error)
            for cause in _causes(error):
                traceback.clear_frames(cause.__traceback__)
                if isinstance(cause, SteelyardError):  # What a conversion refuses as it reads its source.
                    raise cause from None
            raise NotWritten(f"checkpoint {files.final(path.name)} could not be written: {reason}") from error
    rank = 0 if group is None else dist.get_rank(group)
    mine = [*unfinished.glob(f"__{rank}_*"), *([unfinished / ".metadata"] if rank == 0 else [])]
    return {file.name: _checksum(file) for file in sorted(mine)}


def _gathered(sums: dict[str, str], group: dist.ProcessGroup) -> dict[str, str]:
    everyones: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyones, sums, group=group)
    return {name: checksum for each in everyones for name, checksum in each.items()}


def _finish(unfinished: Path, state: dict[str, Any], sums: dict[str, str]) -> None:
    state_file.write(unfinished, state, sums)


def fill(unfinished: Path, held: Holdings, state: dict[str, Any] | None) -> None:
    """Write a checkpoint into a folder that has no name yet; without a state it is not one of ours."""
    sums = _written(held, unfinished, unfinished, None)
    if state is not None:
        _finish(unfinished, state, sums)


def latest(folder: Path, set_aside: bool = False) -> Checkpoint | None:
    """The newest whole checkpoint of a run, or None if the run has no checkpoints.

    Damaged ones are reported and passed over; with `set_aside`, which is for the process that writes the run, they are
    moved to `damaged/`. If all are damaged, that is an error, and they stay where they are.
    """
    passed_over: list[Path] = []
    for path in reversed(step_folders.by_age(folder)):
        try:
            found = _opened(path)
        except CorruptFileError as damage:
            console.warn(f"{damage.message}; trying the checkpoint before it")
            passed_over.append(path)
            continue
        for damaged in passed_over if set_aside else ():
            step_folders.move_aside(damaged)
        return found
    if passed_over or step_folders.by_age(folder / step_folders.DAMAGED):
        raise RuntimeFailure(
            f"every checkpoint in {folder} is damaged",
            hint="restore one from a copy, or start from step 0 in a new folder with --resume never",
        )
    return None


def source(path: str | Path) -> Checkpoint:
    """The checkpoint a user means by a checkpoint folder or by a run folder, whose newest it is."""
    path = Path(path)
    if (path / STATE).is_file():
        return _opened(path)
    if (path / MANIFEST).is_file():
        newest = latest(Run.open(path).checkpoints)
        if newest is None:
            raise UserError(f"{path} has no checkpoint yet")
        return newest
    raise UserError(f"{path} is neither a checkpoint nor a run folder", hint="name a folder under runs/")


def load(checkpoint: Checkpoint, tensors: Tensors) -> None:
    """Fill the tensors in place, each rank on its own. What does not fit is refused before anything is read.

    NaN and infinite values are refused by the parameter's name, on the ranks that read them.
    """
    saved = checkpoint.shapes()
    pieces = {
        name: tensor if isinstance(tensor, TensorShard) else TensorShard.whole(tensor)
        for name, tensor in tensors.items()
    }
    wrong = [
        f"{name}: {saved.get(name, 'missing')} in the checkpoint, {piece.shape} wanted"
        for name, piece in pieces.items()
        if saved.get(name) != piece.shape
    ]
    if wrong:
        raise UserError(f"{checkpoint.path} does not fit the model:\n  " + "\n  ".join(wrong[:10]))
    with _single_process():
        reader = SafeReader(str(checkpoint.path), checkpoint.metadata)
        try:
            dcp.load(dict(pieces), storage_reader=reader, planner=ReadingPieces(), no_dist=True)
        except CheckpointException as error:
            raise CorruptFileError(f"{checkpoint.path} cannot be read: {_reason(error)}") from error
    hint = "use an earlier checkpoint; to resume the run from the one before, move this folder away"
    refuse_nonfinite({name: piece.tensor for name, piece in pieces.items()}, checkpoint.path, hint)


@contextlib.contextmanager
def _single_process() -> Iterator[None]:
    """torch warns that it assumes a single process even when told so by `no_dist`."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*assuming the intent is to (save|load) in a single process")
        yield


@contextlib.contextmanager
def _failed_streams_are_quiet() -> Iterator[None]:
    """torch flushes a stream that it could not write again when that is freed; from 3.13 on Python prints the error.

    The frames of the first error hold the stream, so they have to be cleared inside this context.
    """
    before = sys.unraisablehook

    def hook(raised: sys.UnraisableHookArgs) -> None:
        # Python 3.13 gives the stream itself, 3.14 names it in the message.
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
    """What went wrong below torch's own words: the system's complaint, if there is one."""
    causes = list(_causes(error))
    for cause in causes:
        if isinstance(cause, OSError):
            return str(cause.strerror or cause)
    return str(causes[0]) if causes else str(error)


def _causes(error: CheckpointException) -> Iterator[BaseException]:
    """Each rank's error, and those below it."""
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
