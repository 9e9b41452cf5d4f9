"""Dropout whose choice depends on the seed, the sample, the place and the module's name, and on nothing else.

A generator's state would make it depend on the rank and on what ran before. Here each element's fate is a hash, so
every layout drops the same elements, a resumed run drops what the undisturbed one did, and a recomputed layer what it
dropped the first time.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

# Odd constants of 62 bits: products wrap around in int64, which is what mixes.
FACTORS = (0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9, 0x14D049BB133111EB)
KEPT_BITS = 24


def salt_of(seed: int, name: str) -> int:
    """A number that stands for a module in a run."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}/dropout".encode()).digest()[:7], "little")


class Dropout(nn.Module):
    """Drops a share of the elements and scales the others up; sequence is dimension -2, channels are the last one.

    `part` is (index, number) when this process holds one of several equal pieces of the sequence.
    """

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share
        self.salt = 0
        self.part = (0, 1)

    def forward(self, x: Tensor, sample_ids_B: Tensor | None, row_positions_BL: Tensor | None) -> Tensor:
        if self.share == 0 or not self.training or sample_ids_B is None or row_positions_BL is None:
            return x
        length = x.shape[-2]
        row_positions_BL = row_positions_BL[:, self.part[0] * length : self.part[0] * length + length]
        rows_BL = mixed(mixed(sample_ids_B * FACTORS[0] + self.salt)[:, None] + row_positions_BL * FACTORS[1])
        dropped: Tensor = kept(x, rows_BL, self.share)
        return dropped


@torch.compiler.disable  # type: ignore[untyped-decorator]
def kept(x: Tensor, rows: Tensor, share: float) -> Tensor:
    """`x` without the elements that the hashes of its rows and their last dimension choose.

    It stays out of compiled layers: torch 2.11's compiler fails on the shifts of 64-bit numbers beside a softmax.
    """
    columns = torch.arange(x.shape[-1], device=x.device) * FACTORS[2]
    draw = mixed(rows[..., None] + columns) >> (62 - KEPT_BITS) & ((1 << KEPT_BITS) - 1)
    return torch.where(draw < int(share * (1 << KEPT_BITS)), 0.0, x / (1 - share)).to(x.dtype)


def mixed(value: Tensor) -> Tensor:
    """Spread every bit of an int64 over all of them."""
    value = (value ^ (value >> 32)) * FACTORS[1]
    value = (value ^ (value >> 29)) * FACTORS[2]
    return value ^ (value >> 32)
