"""Matrices of which every four neighbours keep two, as values and where they were.

How they lie in a file stands in `checkpoint.formats.compressed`, how they lie in a GPU's memory in `decode.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from steelyard.checkpoint.formats.compressed import places_of
from steelyard.core.errors import UserError

GROUP, KEPT = 4, 2
BLOCK_WORDS, BLOCK_GROUPS = 32, 256


@dataclass(frozen=True)
class Packed:
    """A matrix in a GPU's memory: its weights two to a group, and each group's mask, as `decode` reads them."""

    values: Tensor
    """(outputs, 2 * groups), 16-bit floats."""
    words: Tensor
    """(outputs, words of a row), int32."""

    @property
    def outputs(self) -> int:
        """Rows of the matrix."""
        return self.values.shape[0]

    @property
    def groups(self) -> int:
        """Groups of four inputs in a row."""
        return self.values.shape[1] // KEPT


def follows(weight: Tensor) -> bool:
    """Whether every four neighbours of a row hold two zeros or more."""
    if weight.shape[1] % GROUP:
        return False
    return bool((weight.unflatten(1, (-1, GROUP)).count_nonzero(2) <= KEPT).all())


def compress(weight: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Values and indices of a matrix, as they lie in a file. One that is not 2:4 is refused by its name."""
    if not follows(weight):
        raise UserError(
            f"{name} does not follow 2:4: {_shortcoming(weight)}",
            mend="prune it (steelyard prune --pattern 2:4), apply a mask, or leave it dense with --allow-dense",
        )
    groups = weight.unflatten(1, (-1, GROUP))
    # What is not zero comes first, then zeros, both in their order; of these the first two, again in their order.
    places = (groups == 0).to(torch.uint8).argsort(dim=2, stable=True)[..., :KEPT].sort(dim=2).values
    values = groups.gather(2, places).flatten(1)
    halves = (places[..., 0] + 4 * places[..., 1]).to(torch.uint8)
    if halves.shape[1] % 2:
        halves = torch.cat([halves, halves.new_zeros(len(halves), 1)], dim=1)
    return values, halves[:, ::2] | halves[:, 1::2] << 4


def packed(values: Tensor, indices: Tensor) -> Packed:
    """A compressed matrix as a GPU's kernels read it."""
    groups = values.shape[1] // KEPT
    places = places_of(indices, groups).int()
    masks = (1 << places[..., 0]) | (1 << places[..., 1])
    blocks = -(-groups // BLOCK_GROUPS)
    filled = torch.zeros(len(masks), blocks * BLOCK_GROUPS, dtype=torch.int32, device=masks.device)
    filled[:, :groups] = masks
    steps = filled.unflatten(1, (blocks, 8, BLOCK_WORDS))
    words = torch.zeros(len(masks), blocks, BLOCK_WORDS, dtype=torch.int32, device=masks.device)
    for step in range(8):
        words |= steps[:, :, step] << 4 * step
    return Packed(values.contiguous(), words.flatten(1))


def _shortcoming(weight: Tensor) -> str:
    if weight.shape[1] % GROUP:
        return f"it has {weight.shape[1]} inputs, which are no multiple of {GROUP}"
    kept = weight.unflatten(1, (-1, GROUP)).count_nonzero(2)
    return f"{int((kept > KEPT).sum())} of its {kept.numel()} groups of four have more than two weights"
