"""What a model that writes remembers: the keys and values of the tokens it has seen.

With them a new token costs one column of attention instead of a pass over the whole text. Memory for all places is
taken once, when the first tokens come in and tell what a layer keeps: under tensor parallelism that is a rank's heads.

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
        """What the layer of this number keeps."""
        if layer not in self._layers:
            self._layers[layer] = LayerCache(self.capacity)
        return self._layers[layer]

    def forget(self, length: int = 0) -> None:
        """Begin anew, or go on after so many tokens, in the same memory."""
        self.length = length
        for layer in self._layers.values():
            layer.length = length


class LayerCache:
    """Keys and values of one layer."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self._both: tuple[Tensor, Tensor] | None = None

    def extended(self, key_BKLE: Tensor, value_BKLE: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values so far, the new ones last."""
        if self._both is None:
            batch, heads, _, width = key_BKLE.shape
            key_room = key_BKLE.new_empty(batch, heads, self.capacity, width)
            self._both = key_room, value_BKLE.new_empty(batch, heads, self.capacity, width)
        end = self.length + key_BKLE.shape[2]
        assert end <= self.capacity, f"{end} tokens do not fit a cache for {self.capacity}"
        for room, new in zip(self._both, (key_BKLE, value_BKLE), strict=True):
            room[:, :, self.length : end] = new
        self.length = end
        return self._both[0][:, :, :end], self._both[1][:, :, :end]
