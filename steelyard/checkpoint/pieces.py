"""Pieces: how torch.distributed.checkpoint is told which part of a tensor this rank has.

It knows how to ask an object for its place in the whole by three methods. A piece answers them for a plain tensor and an
offset, so that any layout can write what it has and any other can read what it needs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType


@dataclass(frozen=True)
class Piece:
    """A tensor, and where in the whole of the given shape it lies."""

    tensor: Tensor
    shape: tuple[int, ...]
    offset: tuple[int, ...]

    @classmethod
    def whole(cls, tensor: Tensor) -> Piece:
        """A tensor that is not divided."""
        return cls(tensor, tuple(tensor.shape), (0,) * tensor.ndim)

    def copied(self) -> Piece:
        """The same in memory of its own, on the host."""
        return Piece(self.tensor.detach().to("cpu", copy=True), self.shape, self.offset)

    def _chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(offsets=torch.Size(self.offset), sizes=self.tensor.size())

    def __create_write_items__(self, name: str, piece: object) -> list[WriteItem]:
        data = TensorWriteData(self._chunk(), TensorProperties.create_from_tensor(self.tensor), torch.Size(self.shape))
        index = MetadataIndex(name, torch.Size(self.offset))
        return [WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [self._chunk()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return self.tensor
