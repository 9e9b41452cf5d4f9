"""Which dataset sample number i of a blend comes from.

Megatron's rule: each sample goes to the dataset that is furthest behind its share, the first of equals. It is exact
at every prefix of the sequence, not only on average, but each choice depends on the one before it. To do it without a
compiled loop, the sequence is cut into blocks that are walked side by side, one numpy operation for a step of all of
them. A block starts a little early from a guess of how much each dataset has given so far; the rule pulls wrong
guesses together within a few rounds. Where a block's start still differs from its predecessor's end, it is walked
again from there, so the result is always exactly the rule's.

How far a dataset is behind is `weight * number - taken`. The standard order rounds the product and the difference, as
Megatron's helper does where it is built for x86. Compilers for ARM fuse both into one instruction that rounds once
(`-ffp-contract=fast`), which decides some ties differently: that is the `fma` order. Both are the same on every
machine, since neither depends on how anything was compiled here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from steelyard.tokens import fma

BLOCK = 4096
WARM_UP = 256
Counts = npt.NDArray[np.float64]  # (datasets, blocks): what each dataset has given when a block starts or ends
Order = Literal["standard", "fma"]
Shortfall = Callable[[Counts, Counts, Counts], None]
"""From the blocks' sample numbers and what was taken, how far each dataset is behind, into the last argument."""


def normalised(weights: Sequence[float]) -> list[float]:
    """Weights that sum to 1."""
    shares = np.asarray(weights, dtype=np.float64)
    result: list[float] = (shares / np.sum(shares)).tolist()
    return result


def blend_order(
    weights: Sequence[float], samples: int, order: Order = "standard"
) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.int64]]:
    """For each sample of the blend: its dataset, and its number within that dataset."""
    shares = np.asarray(weights, dtype=np.float64)
    shortfall = _rounded_once(shares) if order == "fma" else _rounded_twice(shares)
    starts = np.arange(0, samples, BLOCK, dtype=np.int64)
    begins = _settled(shares, starts, shortfall)
    choices, ends = _walk(shortfall, starts, begins, min(BLOCK, samples))
    while (wrong := np.flatnonzero((begins[:, 1:] != ends[:, :-1]).any(axis=0)) + 1).size:
        begins[:, wrong] = ends[:, wrong - 1]
        choices[:, wrong], ends[:, wrong] = _walk(shortfall, starts[wrong], begins[:, wrong], BLOCK)
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


def _walk(
    shortfall: Shortfall, starts: npt.NDArray[np.int64], begins: Counts, steps: int
) -> tuple[npt.NDArray[np.uint16], Counts]:
    """Follow the rule in every block at once; returns the choices (steps, blocks) and the counts at the ends."""
    datasets, blocks = begins.shape
    taken, behind = begins.copy(), np.empty_like(begins)
    flat, columns = taken.reshape(-1), np.arange(blocks)
    # The first of equals has the highest rank, so that the largest rank among the furthest behind is the rule's choice.
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


def _settled(shares: Counts, starts: npt.NDArray[np.int64], shortfall: Shortfall) -> Counts:
    """A guess of the counts at each block's start: rounded shares some steps before it, then the rule up to it."""
    before = np.maximum(starts - WARM_UP, 0)
    ideal = shares[:, None] * before
    counts = np.floor(ideal)
    missing = before - counts.sum(axis=0)
    places = np.argsort(np.argsort(counts - ideal, axis=0, kind="stable"), axis=0)
    counts += places < missing
    counts[:, 1:] = _walk(shortfall, before[1:], counts[:, 1:], WARM_UP)[1]
    return counts
