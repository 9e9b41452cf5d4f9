"""Which dataset sample number i of a blend comes from.

Megatron's rule: each sample goes to the dataset that is furthest behind its share, the first of equals. It is exact
at every prefix of the sequence, not only on average.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


def normalised(weights: Sequence[float]) -> list[float]:
    """Weights that sum to 1."""
    total = sum(weights)
    return [weight / total for weight in weights]


def blend_order(weights: Sequence[float], samples: int) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.int64]]:
    """For each sample of the blend: its dataset, and its number within that dataset."""
    shares = np.asarray(weights, dtype=np.float64)
    taken = np.zeros(len(shares), dtype=np.int64)
    dataset_index = np.empty(samples, dtype=np.int16)
    sample_index = np.empty(samples, dtype=np.int64)
    for number in range(samples):
        chosen = int(np.argmax(shares * max(number, 1) - taken))
        dataset_index[number] = chosen
        sample_index[number] = taken[chosen]
        taken[chosen] += 1
    return dataset_index, sample_index
