"""Sparsity patterns: N of every M consecutive weights along the input dimension, or a share of each row.

"2:4" keeps two of four, which GPUs can accelerate. "0.5" prunes half of the weights anywhere in a row.

Quantised weights have many equal magnitudes, so equal scores often meet at the cut. A hash of the weight's row and
column in the whole matrix breaks these ties: no column is favoured, and every layout and device keeps the same weights.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from steelyard.core.errors import UserError
from steelyard.sparsity.gumbel import mixed

LARGEST_GROUP = 1024


@dataclass(frozen=True)
class Pattern:
    """Keeps `keep` of every `group` weights; without groups (`group` is 0), prunes a `share` of them."""

    keep: int
    group: int
    share: float = 0.0

    @classmethod
    def parse(cls, text: str, where: str = "--pattern") -> Pattern:
        """Parse a pattern such as "2:4" or "0.5"."""
        ratio = re.fullmatch(r"(\d{1,4}):(\d{1,4})", text)
        if ratio and 0 < int(ratio[1]) < int(ratio[2]) <= LARGEST_GROUP:
            return cls(int(ratio[1]), int(ratio[2]))
        if re.fullmatch(r"0?\.\d{1,9}", text) and float(text) > 0:
            return cls(0, 0, float(text))
        raise UserError(
            f"{text} is not a sparsity pattern",
            where=where,
            hint="use 2:4 to keep two of every four weights, or 0.5 to prune half of them",
        )

    def __str__(self) -> str:
        return f"{self.keep}:{self.group}" if self.group else f"{self.share:g}"

    def candidates(self) -> Tensor:
        """All masks of a group, as rows of zeros and ones: 1100, 1010, 1001, 0110, 0101, 0011 for 2:4."""
        assert self.group, "a pattern without groups has no candidates"
        rows = list(itertools.combinations(range(self.group), self.keep))
        masks = torch.zeros(len(rows), self.group)
        return masks.scatter_(1, torch.tensor(rows), 1.0)

    def keep_best(self, scores_OI: Tensor, hash_OI: Tensor | None = None, across_rows: bool = False) -> Tensor:
        """True where a weight is kept: the highest scores of each group, or of each row without groups.

        Scores are not negative. `hash_OI` breaks ties (`place_hash`); the default is that of a whole matrix.
        SparseGPT compares all rows of a block of columns instead (`across_rows`), which matters only without groups.
        """
        hash_OI = place_hash(scores_OI.shape, scores_OI.device) if hash_OI is None else hash_OI
        # Floats that are not negative have the order of their bits as integers.
        ranked_OI = (scores_OI.float().view(torch.int32).long() << 32) + hash_OI
        order_GM = self._groups(ranked_OI, across_rows).argsort(dim=-1, descending=True, stable=True)
        members = order_GM.shape[-1]
        keep = self.keep if self.group else members - int(members * self.share)
        kept_GM = torch.zeros_like(order_GM, dtype=torch.bool).scatter_(-1, order_GM[:, :keep], True)
        return kept_GM.view(scores_OI.shape)

    def ties(self, scores_OI: Tensor, mask_OI: Tensor, across_rows: bool = False) -> Tensor:
        """For each group, whether a pruned weight has the score of a kept one."""
        scores_GM, mask_GM = (self._groups(tensor, across_rows) for tensor in (scores_OI, mask_OI))
        lowest_kept_G = scores_GM.masked_fill(~mask_GM, torch.inf).amin(dim=-1)
        return lowest_kept_G == scores_GM.masked_fill(mask_GM, -torch.inf).amax(dim=-1)

    def _groups(self, matrix_OI: Tensor, across_rows: bool) -> Tensor:
        """The weights that compete with each other, along the last dimension."""
        if self.group:
            return matrix_OI.reshape(-1, self.group)
        return matrix_OI.reshape(1, -1) if across_rows else matrix_OI

    def follows(self, mask: Tensor) -> bool:
        """Whether a mask has this pattern: every group keeps `keep` weights, or the pruned share is right."""
        if self.group:
            if mask.shape[-1] % self.group:
                return False
            return bool((mask.unflatten(-1, (-1, self.group)).sum(-1) == self.keep).all())
        # Each row is rounded separately, so the total may be off by one weight per row.
        pruned = mask.numel() - int(mask.sum())
        return abs(pruned - mask.numel() * self.share) <= mask.numel() // mask.shape[-1] + 1

    def check(self, sizes: Mapping[str, tuple[int, ...]]) -> None:
        """Refuse matrices whose inputs are not a multiple of the group."""
        for name, size in sizes.items():
            if self.group and size[-1] % self.group:
                raise UserError(
                    f"{name} has {size[-1]} inputs, which is not a multiple of {self.group}",
                    where=f"pattern {self}",
                    hint="choose a pattern whose group size divides the inputs, or exclude the matrix with --exclude",
                )


def place_hash(shape: Sequence[int], device: torch.device, first: tuple[int, int] = (0, 0)) -> Tensor:
    """A hash of each place of a matrix, or of its shard or block that begins at row and column `first`, as int32.

    The places of one row have different hashes.
    """
    rows, columns = (
        torch.arange(start, start + size, dtype=torch.int32, device=device)
        for start, size in zip(first, shape, strict=True)
    )
    return mixed(mixed(rows)[:, None] + columns)
