"""The input of a model: rows of tokens, with labels, positions and documents.

Tensor suffixes: B batch, L length, N documents of a row, K loss positions of a row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """Rows of tokens. All fields except the tokens are optional."""

    tokens_BL: Tensor
    labels_BL: Tensor | None = None
    """The token to predict at each position. With labels a model returns the loss instead of logits."""
    loss_weights_BL: Tensor | None = None
    """The weight of each position in the loss; 1 everywhere without it. A mask is a weight of 0 or 1."""
    loss_positions_BK: Tensor | None = None
    """The positions whose weight is not 0, so that the head can skip all others."""
    position_ids_BL: Tensor | None = None
    """The position of each token for the model, which may restart with each document."""
    row_positions_BL: Tensor | None = None
    """The position of each token in the whole row, also if this rank holds a part of it. Dropout hashes it."""
    documents_BL: Tensor | None = None
    """The number of each token's document. Attention stays within documents."""
    document_starts_BN: Tensor | None = None
    """The first position of each document, on the host, for variable-length attention."""
    sample_ids_B: Tensor | None = None
    """The number of each sample in the run, which seeds dropout, sampled masks and noise."""
    logits_to_keep: int | None = None
    """Return the logits of this many last positions only."""
    extra: dict[str, Tensor] = field(default_factory=dict)
    """Values for extensions, one row per sample; the model does not read them."""

    def __len__(self) -> int:
        return len(self.tokens_BL)

    def tensors(self) -> dict[str, Tensor]:
        """The fields that are set, by name, without `extra`."""
        named = ((name.name, getattr(self, name.name)) for name in dataclasses.fields(self))
        return {name: value for name, value in named if isinstance(value, Tensor)}

    def replace(self, **changes: Tensor | None) -> Batch:
        """A copy with some fields replaced."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]

    def micro_batches(self, size: int) -> Iterator[Batch]:
        """The rows, `size` at a time."""
        for first in range(0, len(self), size):
            yield Batch(**{name: value[first : first + size] for name, value in self.tensors().items()})  # type: ignore[arg-type]
