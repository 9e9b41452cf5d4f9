"""Batches for one data-parallel rank, prefetched by a thread.

A step takes the next `global_batch` samples by number, and each rank an equal, contiguous part of them. So a batch
does not depend on the number of ranks, and the only state is the number of consumed samples: a run can stop at any
step and resume with another number of ranks.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from steelyard.tokens.samples import Samples

AHEAD = 2
Rows = dict[str, npt.NDArray[Any]]
"""Fields of `model.Batch` as arrays, one sample per row: `tokens_BL`, `labels_BL`, and others that the samples have."""


@dataclass(frozen=True)
class RankBatch:
    """The rows of one rank for one step."""

    rows: Rows
    first: int
    """The sample number of the first row in the run."""
    consumed: int
    labels: int
    """The number of predictions of the step that count in the loss, over all ranks."""


@dataclass(frozen=True)
class Documents:
    """The document of each input token, and its position there."""

    number: npt.NDArray[np.int64]
    position: npt.NDArray[np.int64]


def documents_in(inputs: npt.NDArray[np.int64], end_of_document: int) -> Documents:
    """Number the documents of each row, and the tokens of each document, which ends with the end-of-document id."""
    starts = np.zeros_like(inputs)
    starts[:, 1:] = inputs[:, :-1] == end_of_document
    positions = np.broadcast_to(np.arange(inputs.shape[1]), inputs.shape)
    begins = np.maximum.accumulate(np.where(starts == 1, positions, 0), axis=1)
    return Documents(number=np.cumsum(starts, axis=1), position=positions - begins)


def starts_of(documents: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    """The start of each document of each row, from the document number of each token.

    Rows with fewer documents than others are padded with empty ones at the end.
    """
    rows, length = documents.shape
    begins = np.ones(documents.shape, dtype=np.bool_)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    most = int(begins.sum(axis=1).max())
    starts = np.full((rows, most), length, dtype=np.int32)
    row, position = np.nonzero(begins)
    starts[row, np.cumsum(begins, axis=1)[row, position] - 1] = position
    return starts


def loss_positions_in(weights: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
    """The loss positions of each row, padded with other positions so that all rows have the same number.

    The number is rounded up to one of at most 64 sizes, so that the memory of one batch is reused for others, and to a
    multiple of 16, which fp8 matrix products need.
    """
    step = -(-weights.shape[1] // (64 * 16)) * 16
    most = int(np.count_nonzero(weights, axis=1).max())
    width = min(weights.shape[1], max(1, -(-most // step)) * step)
    return np.argsort(weights == 0, axis=1, kind="stable")[:, :width]


def read(samples: Samples, first: int, number: int) -> Rows:
    """Samples `first` up to `first + number`, one per row."""
    rows = [samples[index] for index in range(first, first + number)]
    return {name: np.stack([columns(sample)[name] for sample in rows]) for name in columns(rows[0])}


def labels_in(samples: Samples, first: int, number: int, length: int) -> int:
    """The number of predictions that count in samples `first` up to `first + number`."""
    counts = samples.counts
    return number * length if counts is None else int(counts[first : first + number].sum())


def columns(sample: npt.NDArray[np.int64] | Rows) -> Rows:
    """A sample, or rows of samples, as fields of `model.Batch`: the label of a token of plain text is the next one."""
    return sample if isinstance(sample, dict) else {"tokens_BL": sample[..., :-1], "labels_BL": sample[..., 1:]}


class Loader:
    """Yields the batches of one rank, starting at sample `consumed`; `batch_at` returns the size of the next one."""

    def __init__(
        self,
        samples: Samples,
        batch_at: Callable[[int], int],
        consumed: int = 0,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        self.samples, self.batch_at, self.consumed = samples, batch_at, consumed
        self.rank, self.ranks = rank, ranks
        self._ready: queue.Queue[RankBatch | Exception] = queue.Queue(maxsize=AHEAD)
        self._closed = threading.Event()
        self._reader = threading.Thread(target=self._read_ahead, daemon=True, name="loader")
        self._reader.start()

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._closed.set()

    def __iter__(self) -> Iterator[RankBatch]:
        return self

    def __next__(self) -> RankBatch:
        if self.consumed + self.batch_at(self.consumed) > len(self.samples):
            raise StopIteration
        batch = self._ready.get()
        if isinstance(batch, Exception):
            raise batch
        self.consumed = batch.consumed
        return batch

    def _read_ahead(self) -> None:
        first = self.consumed
        while first + self.batch_at(first) <= len(self.samples) and not self._closed.is_set():
            try:
                size = self.batch_at(first)
                part, remainder = divmod(size, self.ranks)
                if remainder:
                    raise ValueError(f"a batch of {size} cannot be divided among {self.ranks} ranks")
                mine = first + self.rank * part
                rows = read(self.samples, mine, part)
                labels = labels_in(self.samples, first, size, rows["tokens_BL"].shape[1])
                first += size
                self._put(RankBatch(rows, mine, first, labels))
            except Exception as error:
                self._put(error)
                return

    def _put(self, batch: RankBatch | Exception) -> None:
        while not self._closed.is_set():
            try:
                self._ready.put(batch, timeout=0.5)
                return
            except queue.Full:
                continue
