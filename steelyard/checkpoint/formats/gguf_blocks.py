"""The number formats of GGUF: blocks of 32 weights with a scale, and sometimes an offset, of their own.

Q4_0   f16 scale; 16 bytes, low halves the first 16 weights: (q - 8) scale
Q4_1   f16 scale, f16 offset; 16 bytes likewise: q scale + offset
Q5_0   f16 scale; u32 of fifth bits; 16 bytes: (q - 16) scale
Q5_1   f16 scale, f16 offset; u32 of fifth bits; 16 bytes: q scale + offset
Q8_0   f16 scale; 32 signed bytes: q scale
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class QuantType:
    """A number format."""

    name: str
    block: int
    block_bytes: int
    decode: Callable[[Array], Array]

    def bytes_of(self, weights: int) -> int:
        """Bytes that so many weights take."""
        return weights // self.block * self.block_bytes

    def values(self, data: Array) -> Array:
        """The weights of raw bytes, in a row."""
        return self.decode(data.reshape(-1, self.block_bytes)).reshape(-1)


def _half(blocks: Array, first: int) -> Array:
    return np.ascontiguousarray(blocks[:, first : first + 2]).view(np.float16).astype(np.float32)


def _nibbles(packed: Array) -> Array:
    return np.concatenate([packed & 0x0F, packed >> 4], axis=1)


def _fifth_bits(blocks: Array, first: int) -> Array:
    bits = np.ascontiguousarray(blocks[:, first : first + 4]).view("<u4")
    return ((bits >> np.arange(32, dtype=np.uint32)) & 1).astype(np.uint8) << 4


def _q4_0(blocks: Array) -> Array:
    return _half(blocks, 0) * (_nibbles(blocks[:, 2:]).astype(np.float32) - 8)


def _q4_1(blocks: Array) -> Array:
    return _half(blocks, 0) * _nibbles(blocks[:, 4:]).astype(np.float32) + _half(blocks, 2)


def _q5_0(blocks: Array) -> Array:
    return _half(blocks, 0) * ((_nibbles(blocks[:, 6:]) | _fifth_bits(blocks, 2)).astype(np.float32) - 16)


def _q5_1(blocks: Array) -> Array:
    values = (_nibbles(blocks[:, 8:]) | _fifth_bits(blocks, 4)).astype(np.float32)
    return _half(blocks, 0) * values + _half(blocks, 2)


def _q8_0(blocks: Array) -> Array:
    return _half(blocks, 0) * blocks[:, 2:].view(np.int8).astype(np.float32)


def _bf16(blocks: Array) -> Array:
    return (np.ascontiguousarray(blocks).view("<u2").astype(np.uint32) << 16).view(np.float32)


KINDS = {
    0: QuantType("F32", 1, 4, lambda blocks: blocks.view("<f4")),
    1: QuantType("F16", 1, 2, lambda blocks: blocks.view("<f2")),
    2: QuantType("Q4_0", 32, 18, _q4_0),
    3: QuantType("Q4_1", 32, 20, _q4_1),
    6: QuantType("Q5_0", 32, 22, _q5_0),
    7: QuantType("Q5_1", 32, 24, _q5_1),
    8: QuantType("Q8_0", 32, 34, _q8_0),
    30: QuantType("BF16", 1, 2, _bf16),
}
