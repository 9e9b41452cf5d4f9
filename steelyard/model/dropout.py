"""Dropout that depends only on the seed, the sample, the position and the name of the module.

The state of a random generator depends on the rank and on earlier operations. Here a hash decides about each element,
so every layout, a resumed run and a recomputed layer drop the same elements.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

# Odd 62-bit constants: their products overflow int64, which mixes the bits.
FACTORS = (0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9, 0x14D049BB133111EB)
KEPT_BITS = 24


def salt_of(seed: int, name: str) -> int:
    """A number that identifies a module in a run."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}/dropout".encode()).digest()[:7], "little")


class Dropout(nn.Module):
    """Drops a share of the elements and scales up the others; dimension -2 is the sequence, -1 the channels.

    `shard` is (index, number) if this process holds one of several equal shards of the sequence.
    """

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share
        self.salt = 0
        self.shard = (0, 1)

    def forward(self, x: Tensor, sample_ids_B: Tensor | None, row_positions_BL: Tensor | None) -> Tensor:
        if self.share == 0 or not self.training or sample_ids_B is None or row_positions_BL is None:
            return x
        length = x.shape[-2]
        row_positions_BL = row_positions_BL[:, self.shard[0] * length : self.shard[0] * length + length]
        rows_BL = mixed(mixed(sample_ids_B * FACTORS[0] + self.salt)[:, None] + row_positions_BL * FACTORS[1])
        dropped: Tensor = drop(x, rows_BL, self.share)
        return dropped


@torch.compiler.disable  # type: ignore[untyped-decorator]
def drop(x: Tensor, rows: Tensor, share: float) -> Tensor:
    """Drop elements of `x`, chosen by the hash of their row and their index in the last dimension.

    Excluded from compiled layers: the compiler of torch 2.11 fails on 64-bit shifts next to a softmax.
    """
    columns = torch.arange(x.shape[-1], device=x.device) * FACTORS[2]
    draw = mixed(rows[..., None] + columns) >> (62 - KEPT_BITS) & ((1 << KEPT_BITS) - 1)
    return torch.where(draw < int(share * (1 << KEPT_BITS)), 0.0, x / (1 - share)).to(x.dtype)


def mixed(value: Tensor) -> Tensor:
    """Hash an int64: each bit of the input affects all bits of the output."""
    value = (value ^ (value >> 32)) * FACTORS[1]
    value = (value ^ (value >> 29)) * FACTORS[2]
    return value ^ (value >> 32)
