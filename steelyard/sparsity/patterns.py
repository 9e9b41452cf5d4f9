"""Which weights of a matrix may stay: N of every M neighbours along the input dimension, or a share of each row.

"2:4" keeps two of four, which is what GPUs can skip. "0.5" prunes half of the weights wherever they lie.
Equal scores are decided by place: the weight with the lower index stays.
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
    """`keep` of every `group` weights stay; without groups (`group` is 0), all but a `share` of them."""

    keep: int
    group: int
    share: float = 0.0

    @classmethod
    def parse(cls, text: str, where: str = "--pattern") -> Pattern:
        """The pattern that is meant by "2:4" or "0.5"."""
        ratio = re.fullmatch(r"(\d{1,4}):(\d{1,4})", text)
        if ratio and 0 < int(ratio[1]) < int(ratio[2]) <= LARGEST_GROUP:
            return cls(int(ratio[1]), int(ratio[2]))
        if re.fullmatch(r"0?\.\d{1,9}", text) and float(text) > 0:
            return cls(0, 0, float(text))
        raise UserError(
            f"{text} is no pattern of sparsity",
            where=where,
            hint="2:4 keeps two of every four weights, 0.5 prunes half of them",
        )

    def __str__(self) -> str:
        return f"{self.keep}:{self.group}" if self.group else f"{self.share:g}"

    def candidates(self) -> Tensor:
        """All masks that a group can have, as rows of zeros and ones: 1100, 1010, 1001, 0110, 0101, 0011 for 2:4."""
        assert self.group, "a pattern without groups has no candidates"
        rows = list(itertools.combinations(range(self.group), self.keep))
        masks = torch.zeros(len(rows), self.group)
        return masks.scatter_(1, torch.tensor(rows), 1.0)

    def keep_best(self, scores: Tensor, across_rows: bool = False) -> Tensor:
        """True where a weight stays: the highest scores of each group, or of each row where there are no groups.

        SparseGPT compares all rows of a block of columns instead (`across_rows`), which matters without groups alone.
        """
        if self.group:
            return _highest(scores.unflatten(-1, (-1, self.group)), self.keep).flatten(-2)
        rows = scores.flatten() if across_rows else scores
        return _highest(rows, rows.shape[-1] - int(rows.shape[-1] * self.share)).view_as(scores)

    def follows(self, mask: Tensor) -> bool:
        """Whether a mask is one of this pattern: every group keeps as many as it should, or the share is right."""
        if self.group:
            if mask.shape[-1] % self.group:
                return False
            return bool((mask.unflatten(-1, (-1, self.group)).sum(-1) == self.keep).all())
        # Each row rounds for itself, so the whole may be off by a weight a row.
        pruned = mask.numel() - int(mask.sum())
        return abs(pruned - mask.numel() * self.share) <= mask.numel() // mask.shape[-1] + 1

    def check(self, sizes: Mapping[str, tuple[int, ...]]) -> None:
        """Refuse matrices whose rows are no whole number of groups."""
        for name, size in sizes.items():
            if self.group and size[-1] % self.group:
                raise UserError(
                    f"{name} has {size[-1]} inputs, which are no multiple of {self.group}",
                    where=f"pattern {self}",
                    hint="choose a pattern whose groups divide the inputs, or leave the matrix out with --exclude",
                )


def _highest(scores: Tensor, count: int) -> Tensor:
    """True at the `count` highest of the last dimension."""
    order = scores.argsort(dim=-1, descending=True, stable=True)
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, order[..., :count], True)
