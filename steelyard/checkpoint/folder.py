"""Checkpoint folders.

    checkpoints/step-00000100/
        __<rank>_0.distcp         tensors by name, or the parts of them that a rank held,
        .metadata                 as torch.distributed.checkpoint lays them out
        state.json                step and counters, and the size and SHA-256 of every other file

The folder is filled under a temporary name by all ranks together, and renamed by the first. Only tensors go through
torch; everything else is JSON. A folder whose files do not match their checksums is not loaded: `latest` names it and
falls back to the one before. What was saved on one layout can be loaded on any other.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import sys
import traceback
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from steelyard.checkpoint.metadata import PortableWriter, SafeReader
from steelyard.checkpoint.pieces import Piece, Promised, ReadingPieces, WritingPieces
from steelyard.core import files
from steelyard.core.console import console
from steelyard.core.errors import Damaged, Fault, UserError
from steelyard.core.run import MANIFEST, Run

STATE = "state.json"
VALID_LOSS = "valid_loss"  # In the state of a checkpoint that was the best when it was saved.
PREFIX = "step-"
TORCH_STREAM = "NoCloseWriter"  # What torch.distributed.checkpoint writes a file through.


class NotWritten(Fault):
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


Tensors = Mapping[str, Tensor | Piece]
# What a writer of other programs' checkpoints has beside pieces: tensors it has yet to make, and nothing, in a list.
Holdings = Mapping[str, Piece | Promised | list[None]]


def save(
    folder: Path, tensors: Tensors, state: dict[str, Any], keep_last: int, group: dist.ProcessGroup | None = None
) -> Path:
    """Save a checkpoint for `state["step"]` and remove all but the newest `keep_last` and the best.

    With a group, all its ranks call this together, each with the pieces it holds. Whatever stops one of them is raised
    on all.
    """
    path = folder / f"{PREFIX}{state['step']:08d}"
    pieces = {name: tensor if isinstance(tensor, Piece) else Piece.whole(tensor) for name, tensor in tensors.items()}
    if group is None:
        with _unfinished(path) as unfinished:
            _finish(unfinished, state, _written(pieces, unfinished, path, None))
    elif dist.get_rank(group) == 0:
        with _unfinished(path) as unfinished:
            dist.broadcast_object_list([str(unfinished)], group_src=0, group=group)
            _finish(unfinished, state, _gathered(_written(pieces, unfinished, path, group), group))
    else:
        name: list[Any] = [None]
        dist.broadcast_object_list(name, group_src=0, group=group)
        _gathered(_written(pieces, Path(name[0]), path, group), group)
    if group is None or dist.get_rank(group) == 0:
        kept = best(folder)
        for old in _by_age(folder)[:-keep_last]:
            if old != kept:
                shutil.rmtree(old)
    return path


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
            raise NotWritten(f"checkpoint {files.final(path.name)} could not be written: {reason}") from error
    rank = 0 if group is None else dist.get_rank(group)
    mine = [*unfinished.glob(f"__{rank}_*"), *([unfinished / ".metadata"] if rank == 0 else [])]
    return {file.name: _checksum(file) for file in sorted(mine)}


def _gathered(sums: dict[str, str], group: dist.ProcessGroup) -> dict[str, str]:
    everyones: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyones, sums, group=group)
    return {name: checksum for each in everyones for name, checksum in each.items()}


def _finish(unfinished: Path, state: dict[str, Any], sums: dict[str, str]) -> None:
    files.write_json(unfinished / STATE, {**state, "files": dict(sorted(sums.items()))})


def fill(unfinished: Path, held: Holdings, state: dict[str, Any] | None) -> None:
    """Write a checkpoint into a folder that has no name yet; without a state it is not one of ours."""
    sums = _written(held, unfinished, unfinished, None)
    if state is not None:
        _finish(unfinished, state, sums)


def latest(folder: Path) -> Checkpoint | None:
    """The newest whole checkpoint of a run, or none. Damaged ones are named and passed over."""
    for path in reversed(_by_age(folder)):
        try:
            return _opened(path)
        except Damaged as damage:
            console.warn(f"{damage.message}; trying the checkpoint before it")
    return None


def best(folder: Path) -> Path | None:
    """The checkpoint of a run with the lowest validation loss, among those whose state tells it."""
    losses: dict[Path, float] = {}
    for path in _by_age(folder):
        with contextlib.suppress(OSError, ValueError, KeyError):
            losses[path] = float(json.loads((path / STATE).read_text(encoding="utf-8"))[VALID_LOSS])
    return min(losses, key=losses.__getitem__, default=None)


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
    raise UserError(f"{path} is neither a checkpoint nor a run folder", mend="name a folder under runs/")


def load(checkpoint: Checkpoint, tensors: Tensors) -> None:
    """Fill the tensors in place, each rank on its own. What does not fit is refused before anything is read."""
    saved = checkpoint.shapes()
    pieces = {name: tensor if isinstance(tensor, Piece) else Piece.whole(tensor) for name, tensor in tensors.items()}
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
            raise Damaged(f"{checkpoint.path} cannot be read: {_reason(error)}") from error


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
    try:
        state = json.loads((path / STATE).read_text(encoding="utf-8"))
        sums = state.pop("files")
    except (OSError, ValueError, KeyError) as error:
        raise Damaged(f"checkpoint {path} is damaged: {STATE}: {error}") from None
    for name, expected in sums.items():
        file = path / name
        if not file.is_file() or _checksum(file) != expected:
            raise Damaged(f"checkpoint {path} is damaged: {name} does not match its checksum")
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


def _by_age(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"{PREFIX}*"))


def _checksum(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
