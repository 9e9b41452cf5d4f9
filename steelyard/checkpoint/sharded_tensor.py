"""Pieces: how torch.distributed.checkpoint is told which part of a tensor this rank has.

It asks an object for its place in the whole by two methods. A piece answers them for a plain tensor and an offset, so
that any layout can write what it has and any other can read what it needs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType


@dataclass(frozen=True)
class TensorShard:
    """A tensor, and where in the whole of the given shape it lies."""

    tensor: Tensor
    shape: tuple[int, ...]
    offset: tuple[int, ...]

    @classmethod
    def whole(cls, tensor: Tensor) -> TensorShard:
        """A tensor that is not divided."""
        return cls(tensor, tuple(tensor.shape), (0,) * tensor.ndim)

    def at(self, offset: torch.Size | None) -> Tensor:
        """The tensor that begins at a place of the whole."""
        return self.tensor

    def copied(self) -> TensorShard:
        """The same in memory of its own, on the host."""
        return TensorShard(self.tensor.detach().to("cpu", copy=True), self.shape, self.offset)

    def _chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(offsets=torch.Size(self.offset), sizes=self.tensor.size())

    def __create_write_items__(self, name: str, piece: object) -> list[WriteItem]:
        data = TensorWriteData(self._chunk(), TensorProperties.create_from_tensor(self.tensor), torch.Size(self.shape))
        index = MetadataIndex(name, torch.Size(self.offset))
        return [WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [self._chunk()]


@dataclass(frozen=True)
class Promised:
    """A whole tensor that is made when it is its turn to be written, in one or more parts along the first dimension.

    So a model that does not fit in memory can be written.
    """

    make: Callable[[int], Tensor]
    """Part by number."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: int = 1

    def at(self, offset: torch.Size | None) -> Tensor:
        """The part that begins at a place of the whole."""
        assert offset is not None
        return self.make(offset[0] * self.parts // self.shape[0]).to(self.dtype).contiguous()

    def __create_write_items__(self, name: str, promised: object) -> list[WriteItem]:
        rows = self.shape[0] // self.parts
        size = torch.Size((rows, *self.shape[1:]))
        items = []
        for part in range(self.parts):
            offset = torch.Size((part * rows, *[0] * (len(self.shape) - 1)))
            chunk = ChunkStorageMetadata(offsets=offset, sizes=size)
            data = TensorWriteData(chunk, TensorProperties(dtype=self.dtype), torch.Size(self.shape))
            items.append(WriteItem(MetadataIndex(name, offset), WriteItemType.SHARD, tensor_data=data))
        return items


class WritingPieces(DefaultSavePlanner):
    """Plans a save of pieces."""

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        """The tensor of a piece."""
        return _tensor(self.state_dict, index)


class ReadingPieces(DefaultLoadPlanner):
    """Plans a load into pieces."""

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        """Take the pieces as they are, where the default would look for tensors to prepare and drop the rest."""
        self.original_state_dict = self.state_dict = state_dict
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """The tensor of a piece."""
        return _tensor(self.state_dict, index)


def _tensor(pieces: dict[str, Any], index: MetadataIndex) -> Tensor:
    held = pieces[index.fqn]
    tensor: Tensor = held.at(index.offset) if isinstance(held, (TensorShard, Promised)) else held
    return tensor
