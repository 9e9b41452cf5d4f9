"""The KV cache of generation: the keys and values of all tokens so far.

With it a new token costs one row of attention instead of a pass over the whole text. Memory for `capacity` tokens is
allocated when the first tokens arrive and show the shape: under tensor parallelism a layer has this rank's heads. A
capacity that was increased later is allocated when it is needed.

With a `Slot` one token is appended at a position that is a tensor, and all shapes stay the same from token to token, so
that a CUDA graph can replay them.

Tensor suffixes: B batch, L length, K key-value heads, E head width.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Slot(NamedTuple):
    """The position of the token that is appended next, in operations of constant shapes."""

    place_1: Tensor
    """The position, int64, on the device of the model."""
    span: int
    """How many positions attention reads. Those after the place are masked."""


ALIGNED = 64  # Memory is allocated for a multiple of this many tokens: kernels read whole blocks.


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
        """Tokens for which there is memory, once there is."""
        return -(-self.capacity // ALIGNED) * ALIGNED

    @property
    def address(self) -> int:
        """Where the memory of the first layer begins; it changes when the cache is allocated again."""
        return next((layer.address for layer in self._layers.values()), 0)

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
        if self.slot is not None:
            return self._written(self.slot, key_BKLE, value_BKLE)
        end = self.length + key_BKLE.shape[2]
        assert end <= self.capacity, f"{end} tokens do not fit in a cache for {self.capacity}"
        if self._buffers is None or end > self._buffers[0].shape[2]:
            batch, heads, _, width = key_BKLE.shape
            before, key_buffer = self._buffers, key_BKLE.new_zeros(batch, heads, self.capacity, width)
            self._buffers = key_buffer, value_BKLE.new_zeros(batch, heads, self.capacity, width)
            for buffer, old in zip(self._buffers, before or (), strict=False):
                buffer[:, :, : self.length] = old[:, :, : self.length]
        for buffer, new in zip(self._buffers, (key_BKLE, value_BKLE), strict=True):
            buffer[:, :, self.length : end] = new
        self.length = end
        return self._buffers[0][:, :, :end], self._buffers[1][:, :, :end]

    def _written(self, slot: Slot, key_BK1E: Tensor, value_BK1E: Tensor) -> tuple[Tensor, Tensor]:
        assert self._buffers is not None, "a slot needs a cache that holds the prompt"
        for buffer, new in zip(self._buffers, (key_BK1E, value_BK1E), strict=True):
            buffer.index_copy_(2, slot.place_1, new)
        return self._buffers[0][:, :, : slot.span], self._buffers[1][:, :, : slot.span]
