"""The KV cache of generation: the keys and values of all tokens so far.

With it a new token costs one row of attention instead of a pass over the whole text. Memory for `capacity` tokens is
allocated when the first tokens arrive and show the shape: under tensor parallelism a layer has this rank's heads. A
capacity that was increased is allocated with the next tokens.

With a `Slot` one token is appended at a position that is a tensor, and all shapes stay the same from token to token, so
that a CUDA graph can replay them.

Tensor suffixes: B batch, L length, K key-value heads, E head width.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from steelyard.model.rope import Rotation


class Slot(NamedTuple):
    """The position of the token that is appended next, in operations of constant shapes."""

    position_1: Tensor
    """The position, int64, on the device of the model."""
    span: int
    """How many positions attention reads. Those after `position_1` are masked."""


STEP = 1024  # Memory grows in steps of this many tokens, so that a conversation seldom needs new memory.


class Cache:
    """Keys and values of every layer, for at least `capacity` tokens in a row."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self.slot: Slot | None = None
        self._layers: dict[str, LayerCache] = {}

    def of(self, layer: str) -> LayerCache:
        """The cache of the layer with this number."""
        if layer not in self._layers:
            self._layers[layer] = LayerCache()
        self._layers[layer].capacity = self.allocated
        self._layers[layer].slot = self.slot
        return self._layers[layer]

    @property
    def allocated(self) -> int:
        """Tokens for which there is memory once the cache has tokens."""
        return -(-self.capacity // STEP) * STEP

    @property
    def address(self) -> int:
        """Where the memory of the first layer begins; it changes when the cache is allocated again."""
        return next((layer.address for layer in self._layers.values()), 0)

    def grow(self) -> None:
        """Allocate the present capacity."""
        for layer in self._layers.values():
            layer.capacity = self.allocated
            layer.grow()

    def forget(self, length: int = 0) -> None:
        """Truncate the cache to `length` tokens and keep its memory."""
        self.length = length
        for layer in self._layers.values():
            layer.length = length


class LayerCache:
    """Keys and values of one layer."""

    def __init__(self) -> None:
        self.capacity = self.length = 0
        self.slot: Slot | None = None
        self._buffers: tuple[Tensor, Tensor] | None = None

    @property
    def address(self) -> int:
        """Where the memory begins."""
        return 0 if self._buffers is None else self._buffers[0].data_ptr()

    def extended(self, key_BKLE: Tensor, value_BKLE: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values so far, the new ones last. With a slot: those of its span."""
        if self._buffers is None:
            self._buffers = self._zeros(key_BKLE), self._zeros(value_BKLE)
        if self.slot is not None:
            for buffer, new in zip(self._buffers, (key_BKLE, value_BKLE), strict=True):
                buffer.index_copy_(2, self.slot.position_1, new)
            return self._until(self.slot.span)
        self.grow()
        end = self.length + key_BKLE.shape[2]
        assert end <= self.capacity, f"{end} tokens do not fit in a cache for {self.capacity}"
        for buffer, new in zip(self._buffers, (key_BKLE, value_BKLE), strict=True):
            buffer[:, :, self.length : end] = new
        self.length = end
        return self._until(end)

    def extended_rotated(
        self, query_BH1E: Tensor, key_BK1E: Tensor, value_BK1E: Tensor, rotation: Rotation
    ) -> tuple[Tensor, Tensor, Tensor]:
        """With a slot, on a GPU: the same with the query, after both were rotated to their position."""
        from steelyard.model.inference_kernels import rotated_into_cache

        assert self.slot is not None
        if self._buffers is None:
            self._buffers = self._zeros(key_BK1E), self._zeros(value_BK1E)
        query_BH1E = rotated_into_cache(
            query_BH1E, key_BK1E, value_BK1E, rotation, *self._buffers, self.slot.position_1
        )
        return query_BH1E, *self._until(self.slot.span)

    def grow(self) -> None:
        """Allocate the present capacity. Where the memory begins changes only if it was less."""
        if self._buffers is None or self._buffers[0].shape[2] >= self.capacity:
            return
        olds, self._buffers = self._buffers, (self._zeros(self._buffers[0]), self._zeros(self._buffers[1]))
        for buffer, old in zip(self._buffers, olds, strict=True):
            buffer[:, :, : old.shape[2]] = old

    def _until(self, end: int) -> tuple[Tensor, Tensor]:
        assert self._buffers is not None
        return self._buffers[0][:, :, :end], self._buffers[1][:, :, :end]

    def _zeros(self, like_BKLE: Tensor) -> Tensor:
        """Memory for all tokens. Masked values must be finite."""
        batch, heads, _, width = like_BKLE.shape
        return like_BKLE.new_zeros(batch, heads, self.capacity, width)
