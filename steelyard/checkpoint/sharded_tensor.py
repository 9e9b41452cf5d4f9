"""Tensor shards for torch.distributed.checkpoint: a plain tensor with its offset in the whole.

torch.distributed.checkpoint gets the offset of an object from two methods, which `TensorShard` implements. So a
checkpoint that was written with one layout can be read with any other.
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
    """A part of a tensor of the given shape, at an offset."""

    tensor: Tensor
    shape: tuple[int, ...]
    offset: tuple[int, ...]

    @classmethod
    def whole(cls, tensor: Tensor) -> TensorShard:
        """A tensor that is not sharded."""
        return cls(tensor, tuple(tensor.shape), (0,) * tensor.ndim)

    def at(self, offset: torch.Size | None) -> Tensor:
        """The tensor at this offset."""
        return self.tensor

    def copied(self) -> TensorShard:
        """A copy on the host."""
        return TensorShard(self.tensor.detach().to("cpu", copy=True), self.shape, self.offset)

    def _chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(offsets=torch.Size(self.offset), sizes=self.tensor.size())

    def __create_write_items__(self, name: str, shard: object) -> list[WriteItem]:
        data = TensorWriteData(self._chunk(), TensorProperties.create_from_tensor(self.tensor), torch.Size(self.shape))
        index = MetadataIndex(name, torch.Size(self.offset))
        return [WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [self._chunk()]


@dataclass(frozen=True)
class LazyTensor:
    """A whole tensor that is computed when it is written, in one or more parts along the first dimension.

    This makes it possible to write a model that does not fit in memory.
    """

    make: Callable[[int], Tensor]
    """Returns a part by its number."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: int = 1

    def at(self, offset: torch.Size | None) -> Tensor:
        """The part at this offset."""
        assert offset is not None
        return self.make(offset[0] * self.parts // self.shape[0]).to(self.dtype).contiguous()

    def __create_write_items__(self, name: str, tensor: object) -> list[WriteItem]:
        rows = self.shape[0] // self.parts
        size = torch.Size((rows, *self.shape[1:]))
        items = []
        for part in range(self.parts):
            offset = torch.Size((part * rows, *[0] * (len(self.shape) - 1)))
            chunk = ChunkStorageMetadata(offsets=offset, sizes=size)
            data = TensorWriteData(chunk, TensorProperties(dtype=self.dtype), torch.Size(self.shape))
            items.append(WriteItem(MetadataIndex(name, offset), WriteItemType.SHARD, tensor_data=data))
        return items


class ShardSavePlanner(DefaultSavePlanner):
    """Plans a save of shards."""

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        """The tensor of a shard."""
        return _tensor(self.state_dict, index)


class ShardLoadPlanner(DefaultLoadPlanner):
    """Plans a load into shards."""

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        """Use the shards unchanged; the default implementation prepares tensors and drops everything else."""
        self.original_state_dict = self.state_dict = state_dict
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """The tensor of a shard."""
        return _tensor(self.state_dict, index)


def _tensor(shards: dict[str, Any], index: MetadataIndex) -> Tensor:
    value = shards[index.fqn]
    tensor: Tensor = value.at(index.offset) if isinstance(value, (TensorShard, LazyTensor)) else value
    return tensor
