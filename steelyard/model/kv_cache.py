"""The KV cache of generation: the keys and values of all tokens so far.

With it a new token costs one row of attention instead of a pass over the whole text. Memory for `capacity` tokens is
allocated when the first tokens arrive and show the shape: under tensor parallelism a layer has this rank's heads. A
capacity that was increased later is allocated when it is needed.

Tensor suffixes: B batch, L length, K key-value heads, E head width.
"""

from __future__ import annotations

from torch import Tensor


class Cache:
    """Keys and values of every layer, for up to `capacity` tokens in a row."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self._layers: dict[str, LayerCache] = {}

    def of(self, layer: str) -> LayerCache:
        """The cache of the layer with this number."""
        if layer not in self._layers:
            self._layers[layer] = LayerCache()
        self._layers[layer].capacity = self.capacity
        return self._layers[layer]

    def forget(self, length: int = 0) -> None:
        """Truncate the cache to `length` tokens and keep its memory."""
        self.length = length
        for layer in self._layers.values():
            layer.length = length


class LayerCache:
    """Keys and values of one layer."""

    def __init__(self) -> None:
        self.capacity = self.length = 0
        self._buffers: tuple[Tensor, Tensor] | None = None

    def extended(self, key_BKLE: Tensor, value_BKLE: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values so far, the new ones last."""
        end = self.length + key_BKLE.shape[2]
        assert end <= self.capacity, f"{end} tokens do not fit in a cache for {self.capacity}"
        if self._buffers is None or end > self._buffers[0].shape[2]:
            batch, heads, _, width = key_BKLE.shape
            before, key_buffer = self._buffers, key_BKLE.new_empty(batch, heads, self.capacity, width)
            self._buffers = key_buffer, value_BKLE.new_empty(batch, heads, self.capacity, width)
            for buffer, old in zip(self._buffers, before or (), strict=False):
                buffer[:, :, : self.length] = old[:, :, : self.length]
        for buffer, new in zip(self._buffers, (key_BKLE, value_BKLE), strict=True):
            buffer[:, :, self.length : end] = new
        self.length = end
        return self._buffers[0][:, :, :end], self._buffers[1][:, :, :end]
