"""The order of a blend: which dataset sample i comes from.

Megatron's rule: each sample comes from the dataset that is furthest behind its share, the first one in a tie. The
shares are right at every prefix of the sequence, not only on average, but each choice depends on the previous one. To
avoid a compiled loop, the sequence is split into blocks that are computed in parallel, with one numpy operation per
step of all blocks. A block starts a little early, with an estimate of the samples taken from each dataset so far; the
rule corrects a wrong estimate within a few steps. A block whose start still differs from the end of the previous block
is computed again from there, so the result always follows the rule exactly.

A dataset is behind by `weight * number - taken`. The `standard` order rounds the product and the difference, as
Megatron's helper does on x86. Compilers for ARM fuse both into one instruction that rounds once (`-ffp-contract=fast`),
which breaks some ties differently: this is the `fma` order. Both orders are the same on every machine, because they do
not depend on a compiler here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from steelyard.tokens import fma

BLOCK = 4096
WARM_UP = 256
Counts = npt.NDArray[np.float64]  # (datasets, blocks): samples taken from each dataset at the start or end of a block
Order = Literal["standard", "fma"]
Shortfall = Callable[[Counts, Counts, Counts], None]
"""Takes the sample numbers of the blocks and the counts, and writes how far each dataset is behind to the last."""


def normalised(weights: Sequence[float]) -> list[float]:
    """Weights that sum to 1."""
    shares = np.asarray(weights, dtype=np.float64)
    result: list[float] = (shares / np.sum(shares)).tolist()
    return result


def blend_order(
    weights: Sequence[float], samples: int, order: Order = "standard"
) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.int64]]:
    """The dataset of each sample of the blend, and its number in that dataset."""
    shares = np.asarray(weights, dtype=np.float64)
    shortfall = _rounded_once(shares) if order == "fma" else _rounded_twice(shares)
    starts = np.arange(0, samples, BLOCK, dtype=np.int64)
    begins = _estimated_starts(shares, starts, shortfall)
    choices, ends = _run_blocks(shortfall, starts, begins, min(BLOCK, samples))
    while (wrong := np.flatnonzero((begins[:, 1:] != ends[:, :-1]).any(axis=0)) + 1).size:
        begins[:, wrong] = ends[:, wrong - 1]
        choices[:, wrong], ends[:, wrong] = _run_blocks(shortfall, starts[wrong], begins[:, wrong], BLOCK)
    dataset_index = choices.T.reshape(-1)[:samples].astype(np.int16)
    sample_index = np.empty(samples, dtype=np.int64)
    for dataset in range(len(shares)):
        places = np.flatnonzero(dataset_index == dataset)
        sample_index[places] = np.arange(places.size)
    return dataset_index, sample_index


def _rounded_twice(shares: Counts) -> Shortfall:
    column = shares[:, None]

    def shortfall(numbers: Counts, taken: Counts, out: Counts) -> None:
        np.multiply(numbers, column, out=out)
        np.subtract(out, taken, out=out)

    return shortfall


def _rounded_once(shares: Counts) -> Shortfall:
    column = shares[:, None]
    column_halves = fma.halves(column)

    def shortfall(numbers: Counts, taken: Counts, out: Counts) -> None:
        out[:] = fma.multiply_subtract(column, numbers, taken, column_halves)

    return shortfall


def _run_blocks(
    shortfall: Shortfall, starts: npt.NDArray[np.int64], begins: Counts, steps: int
) -> tuple[npt.NDArray[np.uint16], Counts]:
    """Apply the rule to all blocks in parallel; returns the choices (steps, blocks) and the counts at the ends."""
    datasets, blocks = begins.shape
    taken, behind = begins.copy(), np.empty_like(begins)
    flat, columns = taken.reshape(-1), np.arange(blocks)
    # Earlier datasets have higher ranks, so the maximum rank among the datasets furthest behind breaks ties.
    ranks = np.arange(datasets, 0, -1, dtype=np.uint8 if datasets < 256 else np.uint16)[:, None]
    furthest, ranked = np.empty_like(begins, dtype=np.bool_), np.empty_like(begins, dtype=ranks.dtype)
    choices = np.empty((steps, blocks), dtype=np.uint16)
    for step in range(steps):
        shortfall(np.maximum(starts + step, 1).astype(np.float64), taken, behind)
        np.equal(behind, behind.max(axis=0), out=furthest)
        np.multiply(furthest, ranks, out=ranked)
        chosen = datasets - ranked.max(axis=0).astype(np.int64)
        choices[step] = chosen
        flat[chosen * blocks + columns] += 1
    return choices, taken


def _estimated_starts(shares: Counts, starts: npt.NDArray[np.int64], shortfall: Shortfall) -> Counts:
    """An estimate of the counts at the start of each block: rounded shares some steps before it, then the rule."""
    before = np.maximum(starts - WARM_UP, 0)
    ideal = shares[:, None] * before
    counts = np.floor(ideal)
    missing = before - counts.sum(axis=0)
    places = np.argsort(np.argsort(counts - ideal, axis=0, kind="stable"), axis=0)
    counts += places < missing
    counts[:, 1:] = _run_blocks(shortfall, before[1:], counts[:, 1:], WARM_UP)[1]
    return counts
