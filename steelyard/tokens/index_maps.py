"""The tokens of sample i: Megatron's three index arrays, vectorized.

The documents of a split are repeated for as many epochs as the samples need, and shuffled (`document_index`). The
resulting stream of tokens is split every `sequence_length` tokens (`sample_index`: document position and offset of each
boundary; neighbours share one token, which is the last label of one and the first input of the next). Then the samples
are shuffled (`shuffle_index`). One random state, seeded once, is used for both shuffles in this order. If less than 80%
of the samples of the last epoch are used, it is shuffled separately, so that it is not mixed with the full epochs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

LAST_EPOCH_THRESHOLD = 0.80
DOCUMENTS_AT_ONCE = 1 << 16


@dataclass(frozen=True)
class IndexMaps:
    """The three arrays for one split of one dataset."""

    document_index: npt.NDArray[np.int32]
    sample_index: npt.NDArray[Any]
    shuffle_index: npt.NDArray[Any]

    def __len__(self) -> int:
        return len(self.shuffle_index)


@dataclass(frozen=True)
class SamplePlan:
    """The number of epochs and samples of the maps, computed before they are built."""

    documents: int
    sequence_length: int
    epochs: int
    samples: int
    samples_before_last_epoch: int
    last_epoch_apart: bool

    def fits(self, maps: IndexMaps, lengths: npt.NDArray[np.int32], bounds: tuple[int, int]) -> bool:
        """Whether loaded arrays are maps of this plan over sequences of these lengths.

        Everything except the two random orders is checked: every sequence occurs once per epoch, the boundaries of
        samples match the lengths, and every sample is used once. Maps of other data, and flipped bits, are rejected.
        """
        documents, cuts, order = maps.document_index, maps.sample_index, maps.shuffle_index
        shapes = (self.documents * self.epochs,), (self.samples + 1, 2), (self.samples,)
        if (documents.shape, cuts.shape, order.shape) != shapes:
            return False
        first = self.samples_before_last_epoch if self.last_epoch_apart else self.samples
        parts = (order[:first], 0), (order[first:], first)
        return (
            all(array.dtype.kind in "iu" for array in (documents, cuts, order))
            and _each_occurs(documents, *bounds, times=self.epochs)
            and all(_each_occurs(part, begin, begin + len(part), times=1) for part, begin in parts)
            and np.array_equal(cuts, _cuts(lengths, documents, self.sequence_length, self.samples))
        )


def plan(lengths: npt.NDArray[np.int32], bounds: tuple[int, int], samples: int, sequence_length: int) -> SamplePlan:
    """Plan the maps for at least `samples` samples of the sequences within `bounds`."""
    tokens = int(np.sum(lengths[bounds[0] : bounds[1]], dtype=np.int64))
    epochs = -(-(samples * sequence_length + 1) // tokens)
    before_last = ((epochs - 1) * tokens - 1) // sequence_length if epochs > 1 else 0
    per_epoch = (tokens - 1) // sequence_length
    return SamplePlan(
        documents=bounds[1] - bounds[0],
        sequence_length=sequence_length,
        epochs=epochs,
        samples=(epochs * tokens - 1) // sequence_length,
        samples_before_last_epoch=before_last,
        last_epoch_apart=epochs > 1 and samples - before_last < int(LAST_EPOCH_THRESHOLD * per_epoch),
    )


def _each_occurs(values: npt.NDArray[Any], first: int, end: int, times: int) -> bool:
    """Whether the values are the numbers from `first` up to `end`, each exactly `times` times."""
    if not len(values):
        return first == end
    if int(values.min()) != first or int(values.max()) != end - 1:
        return False
    return bool((np.bincount(values.astype(np.int64) - first) == times).all())


def build(lengths: npt.NDArray[np.int32], bounds: tuple[int, int], plan: SamplePlan, seed: int) -> IndexMaps:
    """Build the maps."""
    lengths = np.require(lengths, requirements="A")  # They are unaligned in the file, which is slow.
    sequences = np.arange(*bounds, dtype=np.int32)
    random = np.random.RandomState(seed)
    if plan.last_epoch_apart:
        document_index = np.concatenate(
            [_shuffled_epochs(sequences, plan.epochs - 1, random), _shuffled_epochs(sequences, 1, random)]
        )
    else:
        document_index = _shuffled_epochs(sequences, plan.epochs, random)
    sample_index = _cuts(lengths, document_index, plan.sequence_length, plan.samples)
    first = plan.samples_before_last_epoch if plan.last_epoch_apart else plan.samples
    return IndexMaps(document_index, sample_index, _shuffled(first, plan.samples, random))


def _shuffled_epochs(
    sequences: npt.NDArray[np.int32], epochs: int, random: np.random.RandomState
) -> npt.NDArray[np.int32]:
    stream = np.tile(sequences, epochs)
    random.shuffle(stream)
    return stream


def _cuts(
    lengths: npt.NDArray[np.int32], document_index: npt.NDArray[np.int32], sequence_length: int, samples: int
) -> npt.NDArray[Any]:
    """Position in `document_index` and offset of every `sequence_length`-th token of the stream.

    Boundary k comes after every document that ends at or before token k * sequence_length, so its position is the
    number of these documents. They are counted in blocks that fit in the CPU cache.
    """
    dtype = np.int32 if len(document_index) <= np.iinfo(np.int32).max else np.int64
    cuts = np.empty((samples + 1, 2), dtype=dtype)
    tokens_before = cuts_before = 0
    for first in range(0, len(document_index), DOCUMENTS_AT_ONCE):
        starts = np.zeros(min(DOCUMENTS_AT_ONCE, len(document_index) - first) + 1, dtype=np.int64)
        starts[1:] = lengths[document_index[first : first + DOCUMENTS_AT_ONCE]]
        starts[0] = tokens_before - cuts_before * sequence_length
        np.cumsum(starts, out=starts)
        here = min(int(starts[-1] - 1) // sequence_length + 1, samples + 1 - cuts_before)
        if here > 0:
            behind = np.bincount((starts[1:] + (sequence_length - 1)) // sequence_length, minlength=here)[:here]
            positions = np.cumsum(behind)
            block = cuts[cuts_before : cuts_before + here]
            block[:, 0] = positions + first
            block[:, 1] = np.arange(here) * sequence_length - starts[positions]
        tokens_before = int(starts[-1]) + cuts_before * sequence_length
        cuts_before += max(here, 0)
    return cuts


def _shuffled(first: int, total: int, random: np.random.RandomState) -> npt.NDArray[Any]:
    """The numbers below `first` in random order, then those from `first` up to `total` in random order."""
    dtype = np.int64 if total >= np.iinfo(np.uint32).max - 1 else np.uint32
    parts = [np.arange(0, first, dtype=dtype), np.arange(first, total, dtype=dtype)]
    for part in parts:
        if part.size:
            random.shuffle(part)
    return np.concatenate(parts)
