"""Checkpoint folders.

    checkpoints/step-00000100/
        __0_0.distcp, .metadata   tensors by name, as torch.distributed.checkpoint lays them out
        state.json                step and counters, and the size and SHA-256 of every other file

The folder is filled under a temporary name and renamed. Only tensors go through torch; everything else is JSON. A
folder whose files do not match their checksums is not loaded: `latest` names it and falls back to the one before.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from steelyard.checkpoint.metadata import SafeReader
from steelyard.core import files
from steelyard.core.console import console
from steelyard.core.errors import Fault, UserError
from steelyard.core.run import MANIFEST, Run

STATE = "state.json"
PREFIX = "step-"


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

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The tensors inside, by name."""
        entries = SafeReader(str(self.path)).read_metadata().state_dict_metadata
        return {name: tuple(entry.size) for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}


def save(folder: Path, tensors: dict[str, Tensor], state: dict[str, Any], keep_last: int) -> Path:
    """Save a checkpoint for `state["step"]` and remove all but the newest `keep_last`."""
    path = folder / f"{PREFIX}{state['step']:08d}"
    if (
        path.exists()
    ):  # Left by an earlier life of this run; what is about to be written equals it or replaces a broken one.
        shutil.rmtree(path)
    with files.atomic_folder(path) as unfinished:
        writer = dcp.FileSystemWriter(str(unfinished), single_file_per_rank=True)
        with _single_process():
            try:
                dcp.save(tensors, storage_writer=writer, no_dist=True)
            except CheckpointException as error:
                raise Fault(f"checkpoint {path.name} could not be written: {_reason(error)}") from error
        sums = {file.name: _checksum(file) for file in sorted(unfinished.iterdir())}
        files.write_json(unfinished / STATE, {**state, "files": sums})
    for old in _by_age(folder)[:-keep_last]:
        shutil.rmtree(old)
    return path


def latest(folder: Path) -> Checkpoint | None:
    """The newest whole checkpoint of a run, or none. Damaged ones are named and passed over."""
    for path in reversed(_by_age(folder)):
        try:
            return _opened(path)
        except Fault as damage:
            console.warn(f"{damage}; trying the checkpoint before it")
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
    raise UserError(f"{path} is neither a checkpoint nor a run folder", mend="name a folder under runs/")


def load(checkpoint: Checkpoint, tensors: dict[str, Tensor]) -> None:
    """Fill the tensors in place. Names or shapes that do not match are refused before anything is read."""
    saved = checkpoint.shapes()
    wrong = [
        f"{name}: {saved.get(name, 'missing')} in the checkpoint, {tuple(tensor.shape)} wanted"
        for name, tensor in tensors.items()
        if saved.get(name) != tuple(tensor.shape)
    ]
    if wrong:
        raise UserError(f"{checkpoint.path} does not fit the model:\n  " + "\n  ".join(wrong[:10]))
    with _single_process():
        dcp.load(tensors, storage_reader=SafeReader(str(checkpoint.path)), no_dist=True)


@contextlib.contextmanager
def _single_process() -> Iterator[None]:
    """torch warns that it assumes a single process even when told so by `no_dist`."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*assuming the intent is to (save|load) in a single process")
        yield


def _opened(path: Path) -> Checkpoint:
    try:
        state = json.loads((path / STATE).read_text(encoding="utf-8"))
        sums = state.pop("files")
    except (OSError, ValueError, KeyError) as error:
        raise Fault(f"checkpoint {path} is damaged: {STATE}: {error}") from None
    for name, expected in sums.items():
        file = path / name
        if not file.is_file() or _checksum(file) != expected:
            raise Fault(f"checkpoint {path} is damaged: {name} does not match its checksum")
    return Checkpoint(path, state)


def _reason(error: CheckpointException) -> str:
    """What went wrong below torch's own words: the system's complaint, if there is one."""
    causes = [failure for failure, _ in error.failures.values()]
    for failure in causes:
        cause: BaseException | None = failure
        while cause is not None:
            if isinstance(cause, OSError):
                return str(cause.strerror or cause)
            cause = cause.__cause__ or cause.__context__
    return str(causes[0]) if causes else str(error)


def _by_age(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"{PREFIX}*"))


def _checksum(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
