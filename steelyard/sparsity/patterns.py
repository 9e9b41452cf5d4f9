"""Sparsity patterns: N of every M consecutive weights along the input dimension, or a share of each row.

"2:4" keeps two of four, which GPUs can accelerate. "0.5" prunes half of the weights anywhere in a row.
Ties are broken by index: the weight with the lower index is kept.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from steelyard.core.errors import UserError

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

    def keep_best(self, scores: Tensor, across_rows: bool = False) -> Tensor:
        """True where a weight is kept: the highest scores of each group, or of each row without groups.

        SparseGPT compares all rows of a block of columns instead (`across_rows`), which matters only without groups.
        """
        if self.group:
            return _highest(scores.unflatten(-1, (-1, self.group)), self.keep).flatten(-2)
        rows = scores.flatten() if across_rows else scores
        return _highest(rows, rows.shape[-1] - int(rows.shape[-1] * self.share)).view_as(scores)

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


def _highest(scores: Tensor, count: int) -> Tensor:
    """True at the `count` highest scores of the last dimension."""
    order = scores.argsort(dim=-1, descending=True, stable=True)
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, order[..., :count], True)
