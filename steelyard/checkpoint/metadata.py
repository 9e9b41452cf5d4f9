"""Reading torch.distributed.checkpoint's `.metadata`, which is a pickle, without trusting it.

A pickle may name any function and have it called. This reader lets through only the classes that describe tensors.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from steelyard.core.errors import UserError

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
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"} | {name for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype)},
    "pathlib": {"PosixPath", "PurePosixPath"},
}


class SafeReader(dcp.FileSystemReader):
    """A reader of checkpoint folders that unpickles nothing but descriptions of tensors."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What the folder holds, by name."""
        path = Path(self.path) / ".metadata"
        try:
            with open(path, "rb") as file:
                metadata: Metadata = _Unpickler(file).load()
        except (OSError, pickle.UnpicklingError, EOFError, ValueError) as error:
            raise UserError(f"{path} cannot be read: {error}") from None
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in ALLOWED.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which has no place in a checkpoint")
        return super().find_class(module, name)
