"""Batches for one data-parallel rank, read ahead by a thread.

A step takes the next `global_batch` samples by number, and each rank an equal, contiguous part of them. So a batch
does not depend on how many ranks share it, and the only state is how many samples were consumed: a run may stop
anywhere and go on with another number of ranks.
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
"""Fields of `model.Batch` as arrays, a sample per row: `tokens_BL`, `labels_BL`, and what else the samples have."""


@dataclass(frozen=True)
class Batch:
    """The rows of one rank for one step."""

    rows: Rows
    first: int
    """The number of the first row's sample in the run."""
    consumed: int
    labels: int
    """How many tokens the step predicts that count, on all ranks together."""


@dataclass(frozen=True)
class Documents:
    """Where each input token stands in its document, if documents are to be kept apart."""

    number: npt.NDArray[np.int64]
    position: npt.NDArray[np.int64]


def documents_in(inputs: npt.NDArray[np.int64], end_of_document: int) -> Documents:
    """Number the documents among each row's inputs, and the tokens within each; the end-of-document id closes one."""
    starts = np.zeros_like(inputs)
    starts[:, 1:] = inputs[:, :-1] == end_of_document
    places = np.broadcast_to(np.arange(inputs.shape[1]), inputs.shape)
    begins = np.maximum.accumulate(np.where(starts == 1, places, 0), axis=1)
    return Documents(number=np.cumsum(starts, axis=1), position=places - begins)


def starts_of(documents: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    """Where the documents of each row begin, from the number of each token's document.

    Rows with fewer documents than others go on with empty ones at their end.
    """
    rows, length = documents.shape
    begins = np.ones(documents.shape, dtype=np.bool_)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    most = int(begins.sum(axis=1).max())
    starts = np.full((rows, most), length, dtype=np.int32)
    row, place = np.nonzero(begins)
    starts[row, np.cumsum(begins, axis=1)[row, place] - 1] = place
    return starts


def learned_in(weights: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
    """Each row's places that weigh something, filled up with others so that all rows have equally many.

    Their number is rounded up to one of at most 64, so that memory held for one batch serves others, and to a multiple
    of 16, which is what products in fp8 take.
    """
    step = -(-weights.shape[1] // (64 * 16)) * 16
    most = int(np.count_nonzero(weights, axis=1).max())
    width = min(weights.shape[1], max(1, -(-most // step)) * step)
    return np.argsort(weights == 0, axis=1, kind="stable")[:, :width]


def read(samples: Samples, first: int, number: int) -> Rows:
    """Samples `first` up to `first + number`, one per row."""
    found = [samples[index] for index in range(first, first + number)]
    return {name: np.stack([columns(sample)[name] for sample in found]) for name in columns(found[0])}


def labels_in(samples: Samples, first: int, number: int, length: int) -> int:
    """How many predictions count in samples `first` up to `first + number`."""
    counts = samples.counts
    return number * length if counts is None else int(counts[first : first + number].sum())


def columns(sample: npt.NDArray[np.int64] | Rows) -> Rows:
    """A sample, or rows of them, by the model's names: each token of plain text is predicted from those before."""
    return sample if isinstance(sample, dict) else {"tokens_BL": sample[..., :-1], "labels_BL": sample[..., 1:]}


class Loader:
    """Yields one rank's batches from sample number `consumed` on; `batch_at` says how large the next one is."""

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
        self._ready: queue.Queue[Batch | Exception] = queue.Queue(maxsize=AHEAD)
        self._closed = threading.Event()
        self._reader = threading.Thread(target=self._read_ahead, daemon=True, name="loader")
        self._reader.start()

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._closed.set()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
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
                part, left = divmod(size, self.ranks)
                if left:
                    raise ValueError(f"{self.ranks} ranks cannot share a batch of {size}")
                mine = first + self.rank * part
                rows = read(self.samples, mine, part)
                labels = labels_in(self.samples, first, size, rows["tokens_BL"].shape[1])
                first += size
                self._put(Batch(rows, mine, first, labels))
            except Exception as error:
                self._put(error)
                return

    def _put(self, batch: Batch | Exception) -> None:
        while not self._closed.is_set():
            try:
                self._ready.put(batch, timeout=0.5)
                return
            except queue.Full:
                continue
