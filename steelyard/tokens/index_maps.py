"""Which tokens make up sample number i: Megatron's three index arrays, vectorised.

The documents of a split are repeated for as many epochs as the samples need and shuffled (`document_index`); the
resulting stream of tokens is cut every `sequence_length` tokens (`sample_index`: document position and offset of each
cut; neighbours share one token, which is the last label of one and the first input of the next); the samples are
shuffled in turn (`shuffle_index`). One random state, seeded once, serves both shuffles in that order. When the last
epoch would be used for less than 80% of its samples it is shuffled apart, so that it does not thin out the whole
epochs before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

LAST_EPOCH_THRESHOLD = 0.80


@dataclass(frozen=True)
class IndexMaps:
    """The three arrays for one split of one dataset."""

    document_index: npt.NDArray[np.int32]
    sample_index: npt.NDArray[Any]
    shuffle_index: npt.NDArray[Any]

    def __len__(self) -> int:
        return len(self.shuffle_index)


def split_bounds(shares: tuple[float, float, float], sequences: int) -> list[tuple[int, int]]:
    """First and last sequence (exclusive) of the training, validation and test split."""
    ends = [0, *(round(float(share) * sequences) for share in np.cumsum(shares))]
    return list(pairwise(ends))


def build(
    lengths: npt.NDArray[np.int32], bounds: tuple[int, int], samples: int, sequence_length: int, seed: int
) -> IndexMaps:
    """Build the maps for `samples` samples of the sequences within `bounds`."""
    sequences = np.arange(*bounds, dtype=np.int32)
    tokens_per_epoch = int(np.sum(lengths[bounds[0] : bounds[1]], dtype=np.int64))
    epochs = -(-(samples * sequence_length + 1) // tokens_per_epoch)
    total_samples = (epochs * tokens_per_epoch - 1) // sequence_length

    samples_before_last = ((epochs - 1) * tokens_per_epoch - 1) // sequence_length if epochs > 1 else 0
    samples_per_epoch = (tokens_per_epoch - 1) // sequence_length
    in_last = samples - samples_before_last
    last_apart = epochs > 1 and in_last < int(LAST_EPOCH_THRESHOLD * samples_per_epoch)

    random = np.random.RandomState(seed)
    if last_apart:
        document_index = np.concatenate(
            [_shuffled_epochs(sequences, epochs - 1, random), _shuffled_epochs(sequences, 1, random)]
        )
    else:
        document_index = _shuffled_epochs(sequences, epochs, random)
    sample_index = _cuts(lengths, document_index, sequence_length, total_samples)
    shuffle_index = _shuffled(samples_before_last if last_apart else total_samples, total_samples, random)
    return IndexMaps(document_index, sample_index, shuffle_index)


def _shuffled_epochs(
    sequences: npt.NDArray[np.int32], epochs: int, random: np.random.RandomState
) -> npt.NDArray[np.int32]:
    stream = np.tile(sequences, epochs)
    random.shuffle(stream)
    return stream


def _cuts(
    lengths: npt.NDArray[np.int32], document_index: npt.NDArray[np.int32], sequence_length: int, samples: int
) -> npt.NDArray[Any]:
    """Position in `document_index` and offset of every `sequence_length`-th token of the stream."""
    ends = np.cumsum(lengths[document_index], dtype=np.int64)
    cuts = np.arange(samples + 1, dtype=np.int64) * sequence_length
    positions = np.searchsorted(ends, cuts, side="right")
    offsets = cuts - np.where(positions > 0, ends[positions - 1], 0)
    dtype = np.int32 if len(document_index) <= np.iinfo(np.int32).max else np.int64
    return np.stack([positions.astype(dtype), offsets.astype(dtype)], axis=1)


def _shuffled(first: int, total: int, random: np.random.RandomState) -> npt.NDArray[Any]:
    """The numbers below `total` in random order, those below `first` staying in front."""
    dtype = np.int64 if total >= np.iinfo(np.uint32).max - 1 else np.uint32
    parts = [np.arange(0, first, dtype=dtype), np.arange(first, total, dtype=dtype)]
    for part in parts:
        if part.size:
            random.shuffle(part)
    return np.concatenate(parts)
