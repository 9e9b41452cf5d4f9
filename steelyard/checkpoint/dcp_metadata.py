"""Read and write the `.metadata` file of torch.distributed.checkpoint, which is a pickle, safely.

A pickle can call any function. This reader allows only the classes that describe tensors.
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
    # Megatron's torch_dist also stores its save plan.
    "torch.distributed.checkpoint.planner": {"SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"} | {name for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype)},
    "pathlib": {"PosixPath", "PurePosixPath"},
}


class SafeReader(dcp.FileSystemReader):
    """A reader of checkpoint folders that unpickles only descriptions of tensors.

    `known` is metadata that was read before, so that many tensors can be read one at a time.
    """

    def __init__(self, path: str, known: Metadata | None = None) -> None:
        super().__init__(path)
        self.known = known

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The metadata of the folder."""
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
            raise CorruptFileError(f"{path} is not valid: {error.message}") from None
        except Exception as error:  # A malicious or corrupt pickle can raise anything.
            raise CorruptFileError(f"{path} cannot be read: {error}") from None
        return metadata


class PortableWriter(dcp.FileSystemWriter):
    """A writer of checkpoint folders that every Python can read: 3.13 pickles paths under another module name."""

    def storage_meta(self) -> StorageMeta | None:
        """The storage metadata, with the path of the checkpoint as text."""
        meta = super().storage_meta()
        if meta is not None and meta.checkpoint_id is not None:
            meta.checkpoint_id = str(meta.checkpoint_id)
        return meta


def _check(metadata: object, sizes: dict[str, int]) -> None:
    """Reject metadata that points outside the folder, past the end of a file, or to more than the files hold."""
    if not isinstance(metadata, Metadata):
        raise UserError("it does not describe a checkpoint")
    stored: dict[str, int] = {}
    for index, info in metadata.storage_data.items():
        if info.relative_path not in sizes:
            raise UserError(f"{index.fqn} is assigned to {info.relative_path!r}, which is not a file of this folder")
        if info.offset < 0 or info.length < 0 or info.offset + info.length > sizes[info.relative_path]:
            raise UserError(f"{index.fqn} extends past the end of {info.relative_path}: the file is truncated")
        stored[index.fqn] = stored.get(index.fqn, 0) + info.length
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            continue
        if min(entry.size, default=0) < 0 or math.prod(entry.size) * entry.properties.dtype.itemsize > stored.get(
            name, 0
        ):
            raise UserError(f"{name} has the size {tuple(entry.size)}, which is more than its files hold")


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        if module == "pathlib._local":  # Only Python 3.13 pickles paths under this name.
            module = "pathlib"
        if name not in ALLOWED.get(module, ()):
            raise pickle.UnpicklingError(f"it refers to {module}.{name}, which is not allowed in a checkpoint")
        return super().find_class(module, name)


def _member(kind: object, name: object) -> enum.Enum:
    """A member of an enumeration, which Python 3.11.0 to 3.11.3 pickle as an attribute. Rejects anything else."""
    if not (isinstance(kind, type) and issubclass(kind, enum.Enum) and isinstance(name, str)):
        raise pickle.UnpicklingError("it refers to builtins.getattr, which is not allowed in a checkpoint")
    return kind[name]
