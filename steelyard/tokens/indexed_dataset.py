"""Megatron's indexed token files, bit for bit.

`<prefix>.bin` has the raw tokens of all sequences, concatenated. `<prefix>.idx`, little-endian, has their offsets:

    9 bytes   magic "MMIDIDX\\0\\0"
    u64       version, 1
    u8        dtype code of the tokens: 1 u8, 2 i8, 3 i16, 4 i32, 5 i64, 6 f64, 7 f32, 8 u16
    u64       number of sequences
    u64       number of document entries
    i32 each  length of each sequence, in tokens
    i64 each  byte offset of each sequence in the .bin
    i64 each  document index: the first sequence of each document, then the number of sequences

A document without tokens repeats a document entry and adds no sequence.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from steelyard.core.errors import CorruptFileError, UserError
from steelyard.tokens import checksums

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
DTYPES: dict[int, npt.DTypeLike] = {
    1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 6: np.float64, 7: np.float32, 8: np.uint16,
}  # fmt: skip
CODES = {np.dtype(dtype): code for code, dtype in DTYPES.items()}
LARGEST_UINT16_VOCAB = 65_500
ENTRIES_AT_ONCE = 1 << 20
_verified: set[tuple[str, int, tuple[int, ...]]] = set()  # Pairs that this process has checked, with mtimes.


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The dtype for the ids of a vocabulary, by Megatron's rule."""
    return np.dtype(np.uint16 if vocab_size < LARGEST_UINT16_VOCAB else np.int32)


def bin_path(prefix: str | Path) -> Path:
    """The path of the tokens."""
    return Path(f"{prefix}.bin")


def idx_path(prefix: str | Path) -> Path:
    """The path of the index."""
    return Path(f"{prefix}.idx")


class IndexedTokens:
    """A pair of token files, memory-mapped."""

    def __init__(self, prefix: str | Path) -> None:
        prefix = str(prefix).removesuffix(".idx").removesuffix(".bin")
        self.prefix = prefix
        for path in (idx_path(prefix), bin_path(prefix)):
            if not path.is_file():
                raise UserError(f"there is no token file {path}", hint="steelyard data tokenize writes a pair")
        path = idx_path(prefix)
        with open(path, "rb") as file:
            header = file.read(HEADER.size)
        if len(header) < HEADER.size or not header.startswith(MAGIC):
            raise UserError("this is not an index of token files", where=str(path))
        _, version, code, sequences, entries = HEADER.unpack(header)
        if version != 1 or code not in DTYPES:
            raise UserError(f"version {version} with dtype code {code} is not supported", where=str(path))
        self.dtype = np.dtype(DTYPES[code])
        expected = HEADER.size + sequences * 12 + entries * 8
        # Multimodal files have one more byte per sequence.
        if os.path.getsize(path) not in (expected, expected + sequences) or not entries:
            raise UserError(f"the index is truncated or too long: it should have {expected} bytes", where=str(path))
        raw = np.memmap(path, mode="r", dtype=np.uint8)
        self.lengths = _part(raw, HEADER.size, np.int32, sequences)
        self.pointers = _part(raw, HEADER.size + 4 * sequences, np.int64, sequences)
        self.document_index = _part(raw, HEADER.size + 12 * sequences, np.int64, entries)
        size = os.path.getsize(bin_path(prefix))
        needed = int(self.pointers[-1]) + int(self.lengths[-1]) * self.dtype.itemsize if sequences else 0
        if size < needed or size % self.dtype.itemsize:
            raise UserError(f"has {size} bytes, but its index needs {needed}", where=str(bin_path(prefix)))
        stamp = tuple(file.stat().st_mtime_ns for file in (path, bin_path(prefix)))
        if (prefix, size, stamp) not in _verified:  # A process opens a pair once per split.
            problem = next(_problems(self, size), None)
            if problem is not None:
                raise CorruptFileError(
                    problem, where=str(path), hint="copy the pair again, or write an index without gaps"
                )
            checksums.check(prefix)
            _verified.add((prefix, size, stamp))
        empty = np.empty(0, dtype=self.dtype)
        self._tokens = np.memmap(bin_path(prefix), mode="r", dtype=self.dtype) if size else empty

    def __len__(self) -> int:
        return len(self.lengths)

    def sequence(self, number: int, offset: int = 0, length: int | None = None) -> npt.NDArray[Any]:
        """The tokens of one sequence, or a part of it."""
        start = int(self.pointers[number]) // self.dtype.itemsize + offset
        return self._tokens[start : start + (int(self.lengths[number]) - offset if length is None else length)]

    def stream(self, start: int, end: int) -> npt.NDArray[Any]:
        """Tokens `start` up to `end` of the whole file."""
        return self._tokens[start:end]

    def document_lengths(self) -> npt.NDArray[np.int32]:
        """The number of tokens of each document. Only for files with one sequence per document."""
        counts = np.diff(self.document_index)
        if (counts > 1).any():
            raise UserError("documents of several sequences are not supported here", where=str(idx_path(self.prefix)))
        lengths = np.zeros(len(counts), dtype=np.int32)
        lengths[counts == 1] = self.lengths
        return lengths

    def largest(self, first: int, end: int, at_most: int = 1 << 20) -> int:
        """The largest id of the sequences from `first` up to `end`, in at most `at_most` tokens."""
        start = int(self.pointers[first]) // self.dtype.itemsize
        stop = int(self.pointers[end - 1]) // self.dtype.itemsize + int(self.lengths[end - 1])
        return int(self._tokens[start : min(stop, start + at_most)].max())

    def documents(self) -> Iterator[npt.NDArray[Any]]:
        """The tokens of each document."""
        for first, end in zip(self.document_index[:-1], self.document_index[1:], strict=True):
            parts = [self.sequence(number) for number in range(first, end)]
            yield np.concatenate(parts) if parts else np.empty(0, dtype=self.dtype)


def _problems(tokens: IndexedTokens, size: int) -> Iterator[str]:
    """Inconsistencies in an index, or between it and the size of the .bin."""
    end = 0
    for first in range(0, len(tokens), ENTRIES_AT_ONCE):
        part = slice(first, first + ENTRIES_AT_ONCE)
        lengths = tokens.lengths[part].astype(np.int64) * tokens.dtype.itemsize
        if int(lengths.min()) < 0:
            yield "a sequence has a negative length"
            return
        ends = end + np.cumsum(lengths)
        if not np.array_equal(tokens.pointers[part], ends - lengths):
            yield "sequences are not contiguous"
            return
        end = int(ends[-1])
    if size != end:
        yield f"the .bin has {size} bytes, but its index covers {end}"
    documents = np.require(tokens.document_index, requirements="A")
    if documents[0] != 0 or documents[-1] != len(tokens) or bool((documents[1:] < documents[:-1]).any()):
        yield "the document index does not run from 0 to the number of sequences"


def _part(raw: npt.NDArray[np.uint8], start: int, dtype: npt.DTypeLike, count: int) -> npt.NDArray[Any]:
    # The header has 34 bytes, so the arrays are unaligned; numpy handles that.
    return np.frombuffer(raw, dtype=dtype, count=count, offset=start)
