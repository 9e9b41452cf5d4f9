"""Rows for the training loop: packed conversations, each with its own attention and position ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from steelyard.finetuning.encoding import Encoded
from steelyard.finetuning.packing import best_fit, efficiency

Row = dict[str, npt.NDArray[Any]]


class PackedSamples:
    """Rows of `length` tokens, shuffled each epoch; without a seed in order and once, padded with empty rows."""

    def __init__(
        self, conversations: Sequence[Encoded], length: int, samples: int, seed: int | None, packing: bool = True
    ) -> None:
        self.conversations, self.length = conversations, length
        sizes = np.array([each.length for each in conversations], dtype=np.int64)
        self.rows = best_fit(sizes, length) if packing else [[index] for index in range(len(sizes))]
        self.efficiency = efficiency(sizes, self.rows, length)
        self.order = self._order(samples, seed)
        loss_tokens = np.array([int(each.loss_mask[1:].sum()) for each in conversations], dtype=np.int64)
        per_row = np.array([loss_tokens[row].sum() for row in self.rows] + [0], dtype=np.int64)
        self.counts: npt.NDArray[np.int64] = per_row[self.order]

    @property
    def per_epoch(self) -> int:
        """Samples in one epoch."""
        return len(self.rows)

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, number: int) -> Row:
        row = self.order[number]
        return self._row(self.rows[row] if row >= 0 else [])

    def _order(self, samples: int, seed: int | None) -> npt.NDArray[np.int64]:
        """The row of each sample; -1 is an empty row."""
        if seed is None:
            order = np.full(samples, -1, dtype=np.int64)
            order[: len(self.rows)] = np.arange(min(samples, len(self.rows)))
            return order
        random = np.random.RandomState(seed)
        epochs = -(-samples // len(self.rows))
        return np.concatenate([random.permutation(len(self.rows)) for _ in range(epochs)])[:samples]

    def _row(self, members: list[int]) -> Row:
        return row_of([self.conversations[index] for index in members], self.length)


def row_of(conversations: Sequence[Encoded], length: int) -> Row:
    """Concatenated conversations; the padding is a document of its own with loss weight 0."""
    row: Row = {
        "tokens_BL": np.zeros(length, dtype=np.int64),
        "labels_BL": np.zeros(length, dtype=np.int64),
        "loss_weights_BL": np.zeros(length, dtype=np.float32),
        "documents_BL": np.full(length, len(conversations), dtype=np.int64),
        "position_ids_BL": np.zeros(length, dtype=np.int64),
    }
    start = 0
    for number, sample in enumerate(conversations):
        here = slice(start, start + sample.length)
        row["tokens_BL"][here] = sample.ids[:-1]
        row["labels_BL"][here] = sample.ids[1:]
        row["loss_weights_BL"][here] = sample.loss_mask[1:]
        row["documents_BL"][here] = number
        row["position_ids_BL"][here] = np.arange(sample.length)
        start += sample.length
    return row
