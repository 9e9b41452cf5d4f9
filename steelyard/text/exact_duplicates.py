"""Exact duplicates among any number of documents in bounded memory.

A document counts as the 128-bit BLAKE2b hash of its text. The hashes of all documents are one file, 16 bytes each, in
the order of the documents. They are distributed to partitions by their first bits; each partition fits in memory and is
sorted there. What is found (the number of a duplicate and of the first document with its text) goes to files by the
number of the duplicate, so that a second pass over the documents reads it in order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from steelyard.core.console import console

HASH_BYTES = 16
HASH = np.dtype([("high", "<u8"), ("low", "<u8")])
NUMBERED = np.dtype([("high", "<u8"), ("low", "<u8"), ("number", "<u8")])
PAIR = np.dtype([("number", "<u8"), ("first", "<u8")])
HASHES_AT_ONCE = 1 << 20
PARTITION_HASHES = 1 << 22  # about 100 MB, and as much again to sort them
MOST_PARTITIONS = 256  # files open at a time
RANGE = 1 << 22  # documents whose duplicates are in one file

Pairs = npt.NDArray[Any]


def hash_of(text: str) -> bytes:
    """The hash of a document's text. JSON can hold lone surrogates, which UTF-8 cannot."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=HASH_BYTES).digest()


class Duplicates:
    """The duplicates found in a file of hashes; `folder` holds them."""

    def __init__(self, hashes: Path, folder: Path) -> None:
        self.folder, self.count = folder, 0
        folder.mkdir(parents=True, exist_ok=True)
        for leftover in folder.iterdir():
            leftover.unlink()
        total = hashes.stat().st_size // HASH_BYTES
        partitions = 1
        while total > partitions * PARTITION_HASHES and partitions < MOST_PARTITIONS:
            partitions *= 2
        with console.progress("find duplicates", 2 * total, "hashes") as progress:
            for part in _distributed(hashes, folder, partitions, progress.advance):
                pairs = _pairs(np.fromfile(part, NUMBERED))
                progress.advance(part.stat().st_size // NUMBERED.itemsize)
                part.unlink()
                self.count += len(pairs)
                for place in np.unique(pairs["number"] // RANGE):
                    with open(self._path(int(place)), "ab") as file:
                        pairs[pairs["number"] // RANGE == place].tofile(file)
        self._loaded: tuple[int, Pairs] = (-1, np.empty(0, PAIR))

    def between(self, start: int, end: int) -> dict[int, int]:
        """The duplicates among the documents `start` up to `end`, and the first document with the text of each."""
        found: dict[int, int] = {}
        for place in range(start // RANGE, -(-end // RANGE)):
            pairs = self._pairs_in(place)
            first, last = np.searchsorted(pairs["number"], [start, end])
            found.update(zip(pairs["number"][first:last].tolist(), pairs["first"][first:last].tolist(), strict=True))
        return found

    def _pairs_in(self, place: int) -> Pairs:
        if self._loaded[0] != place:
            path = self._path(place)
            pairs = np.fromfile(path, PAIR) if path.exists() else np.empty(0, PAIR)
            self._loaded = (place, np.sort(pairs, order="number"))
        return self._loaded[1]

    def _path(self, place: int) -> Path:
        return self.folder / f"duplicates-{place}"


def _distributed(hashes: Path, folder: Path, partitions: int, advance: Any) -> Iterator[Path]:
    """Write hashes with the numbers of their documents to files by the first bits of the hash."""
    paths = [folder / f"partition-{number}" for number in range(partitions)]
    shift = np.uint64(64 - (partitions - 1).bit_length())
    opened = [open(path, "wb") for path in paths]  # noqa: SIM115
    try:
        with open(hashes, "rb") as file:
            done = 0
            while len(block := np.fromfile(file, HASH, HASHES_AT_ONCE)):
                numbered = np.empty(len(block), NUMBERED)
                numbered["high"], numbered["low"] = block["high"], block["low"]
                numbered["number"] = np.arange(done, done + len(block), dtype=np.uint64)
                part_of = numbered["high"] >> shift if partitions > 1 else np.zeros(len(block), np.uint64)
                for number in range(partitions):
                    numbered[part_of == number].tofile(opened[number])
                done += len(block)
                advance(len(block))
    finally:
        for each in opened:
            each.close()
    yield from paths


def _pairs(numbered: npt.NDArray[Any]) -> Pairs:
    """The documents whose hash an earlier document has, with the first such document."""
    numbered = numbered[np.lexsort((numbered["number"], numbered["low"], numbered["high"]))]
    is_new = np.ones(len(numbered), dtype=bool)
    is_new[1:] = (numbered["high"][1:] != numbered["high"][:-1]) | (numbered["low"][1:] != numbered["low"][:-1])
    firsts = numbered["number"][is_new][np.cumsum(is_new) - 1]
    pairs = np.empty(int((~is_new).sum()), PAIR)
    pairs["number"], pairs["first"] = numbered["number"][~is_new], firsts[~is_new]
    return pairs
