"""The quantization types of GGUF: the bytes of a block of weights, and its weights as floats.

The sizes are listed here because a header is checked against them before anything is read. The package `gguf` of
llama.cpp dequantizes the blocks. A file named Q4_K_M contains Q4_K and Q6_K.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
PLAIN = {"F32": "<f4", "F16": "<f2"}


@dataclass(frozen=True)
class QuantType:
    """A quantization type: its code in a header, weights per block, bytes per block."""

    code: int
    name: str
    block: int
    block_bytes: int

    def bytes_of(self, weights: int) -> int:
        """The number of bytes of this many weights."""
        return weights // self.block * self.block_bytes

    def values(self, data: Array, size: tuple[int, ...]) -> Array:
        """Dequantize raw bytes to an array of this size."""
        if self.name in PLAIN:
            return data.view(PLAIN[self.name]).reshape(size)
        import gguf

        # Pass whole rows: `gguf` processes 16 rows at a time, so single blocks as rows would take minutes.
        rows = data.reshape(-1, self.bytes_of(size[-1])) if data.size else data.reshape(0, self.block_bytes)
        return np.asarray(gguf.dequantize(rows, gguf.GGMLQuantizationType(self.code))).reshape(size)


KINDS = {
    kind.code: kind
    for kind in (
        QuantType(0, "F32", 1, 4),
        QuantType(1, "F16", 1, 2),
        QuantType(2, "Q4_0", 32, 18),
        QuantType(3, "Q4_1", 32, 20),
        QuantType(6, "Q5_0", 32, 22),
        QuantType(7, "Q5_1", 32, 24),
        QuantType(8, "Q8_0", 32, 34),
        QuantType(10, "Q2_K", 256, 84),
        QuantType(11, "Q3_K", 256, 110),
        QuantType(12, "Q4_K", 256, 144),
        QuantType(13, "Q5_K", 256, 176),
        QuantType(14, "Q6_K", 256, 210),
        QuantType(30, "BF16", 1, 2),
    )
}
