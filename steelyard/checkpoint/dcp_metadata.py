"""Reading torch.distributed.checkpoint's `.metadata`, which is a pickle, without trusting it, and writing it plainly.

A pickle may name any function and have it called. This reader lets through only the classes that describe tensors.
"""

from __future__ import annotations

import enum
import math
import pickle
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from steelyard.core.errors import CorruptFileError, UserError

ALLOWED = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    # Megatron's torch_dist also keeps the plan by which it was written.
    "torch.distributed.checkpoint.planner": {"SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"} | {name for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype)},
    "pathlib": {"PosixPath", "PurePosixPath"},
}


class SafeReader(dcp.FileSystemReader):
    """A reader of checkpoint folders that unpickles nothing but descriptions of tensors.

    What was read of a folder before may be given, so that many tensors can be read one at a time.
    """

    def __init__(self, path: str, known: Metadata | None = None) -> None:
        super().__init__(path)
        self.known = known

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What the folder holds, by name."""
        metadata = self.known or self._read()
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def _read(self) -> Metadata:
        path = Path(self.path) / ".metadata"
        try:
            with open(path, "rb") as file:
                metadata: Metadata = _Unpickler(file).load()
            sizes = {file.name: file.stat().st_size for file in path.parent.iterdir() if file.is_file()}
            _check(metadata, sizes)
        except UserError as error:
            raise CorruptFileError(f"{path} is not sound: {error.message}") from None
        except Exception as error:  # A hostile or damaged pickle can fail in any way.
            raise CorruptFileError(f"{path} cannot be read: {error}") from None
        return metadata


class PortableWriter(dcp.FileSystemWriter):
    """A writer of checkpoint folders that every Python can read: 3.13 pickles paths under a name of its own."""

    def storage_meta(self) -> StorageMeta | None:
        """Where the checkpoint was written, as text."""
        meta = super().storage_meta()
        if meta is not None and meta.checkpoint_id is not None:
            meta.checkpoint_id = str(meta.checkpoint_id)
        return meta


def _check(metadata: object, sizes: dict[str, int]) -> None:
    """Refuse a description that points outside the folder, past the end of a file, or to more than the files hold."""
    if not isinstance(metadata, Metadata):
        raise UserError("it describes no checkpoint")
    held: dict[str, int] = {}
    for index, info in metadata.storage_data.items():
        if info.relative_path not in sizes:
            raise UserError(f"{index.fqn} is said to lie in {info.relative_path!r}, which is no file of this folder")
        if info.offset < 0 or info.length < 0 or info.offset + info.length > sizes[info.relative_path]:
            raise UserError(f"{index.fqn} would end past the end of {info.relative_path}: the file was cut")
        held[index.fqn] = held.get(index.fqn, 0) + info.length
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            continue
        if min(entry.size, default=0) < 0 or math.prod(entry.size) * entry.properties.dtype.itemsize > held.get(
            name, 0
        ):
            raise UserError(f"{name} has the size {tuple(entry.size)}, more than its files hold")


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        if module == "pathlib._local":  # As Python 3.13 alone writes paths down.
            module = "pathlib"
        if name not in ALLOWED.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which has no place in a checkpoint")
        return super().find_class(module, name)


def _member(kind: object, name: object) -> enum.Enum:
    """A member of an enumeration, which Python 3.11.0 to 3.11.3 write down as an attribute; of nothing else."""
    if not (isinstance(kind, type) and issubclass(kind, enum.Enum) and isinstance(name, str)):
        raise pickle.UnpicklingError("it names builtins.getattr, which has no place in a checkpoint")
    return kind[name]
