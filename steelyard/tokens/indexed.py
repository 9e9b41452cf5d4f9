"""Megatron's indexed token files, bit for bit.

`<prefix>.bin` is the raw tokens of all sequences, one after the other. `<prefix>.idx`, little-endian, says where each
begins:

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

import contextlib
import os
import struct
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from steelyard.core import files
from steelyard.core.errors import UserError

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
DTYPES: dict[int, npt.DTypeLike] = {
    1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 6: np.float64, 7: np.float32, 8: np.uint16,
}  # fmt: skip
CODES = {np.dtype(dtype): code for code, dtype in DTYPES.items()}
LARGEST_UINT16_VOCAB = 65_500


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The type that holds the ids of a vocabulary, by Megatron's rule."""
    return np.dtype(np.uint16 if vocab_size < LARGEST_UINT16_VOCAB else np.int32)


def bin_path(prefix: str | Path) -> Path:
    """The file of tokens."""
    return Path(f"{prefix}.bin")


def idx_path(prefix: str | Path) -> Path:
    """The file that says where each sequence lies."""
    return Path(f"{prefix}.idx")


class Writer:
    """Appends documents to a pair of files. Twelve bytes per document are held in memory, and no token."""

    def __init__(self, file: Any, dtype: np.dtype[Any]) -> None:
        self._file = file
        self.dtype = dtype
        self.lengths = array("i")
        self.document_ends = array("q", [0])
        self.tokens = 0

    def add(self, ids: npt.ArrayLike) -> None:
        """Add one document of one sequence."""
        sequence = np.asarray(ids, dtype=self.dtype)
        if sequence.size:
            self._file.write(sequence.tobytes())
            self.lengths.append(sequence.size)
            self.tokens += sequence.size
        self.document_ends.append(len(self.lengths))


@contextlib.contextmanager
def writing(prefix: str | Path, dtype: np.dtype[Any]) -> Iterator[Writer]:
    """Write a pair of files that appears when the block ends well; the .idx comes last and marks it whole."""
    idx_path(prefix).unlink(missing_ok=True)
    with files.atomic_file(bin_path(prefix), "wb") as tokens:
        writer = Writer(tokens, dtype)
        yield writer
    with files.atomic_file(idx_path(prefix), "wb") as index:
        lengths = np.frombuffer(writer.lengths, dtype=np.int32)
        pointers = np.zeros(len(lengths), dtype=np.int64)
        np.cumsum(lengths[:-1], dtype=np.int64, out=pointers[1:])
        pointers *= dtype.itemsize
        documents = np.frombuffer(writer.document_ends, dtype=np.int64)
        index.write(HEADER.pack(MAGIC, 1, CODES[dtype], len(lengths), len(documents)))
        for part in (lengths, pointers, documents):
            index.write(part.tobytes())


class IndexedTokens:
    """A pair of token files, memory-mapped."""

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = str(prefix)
        for path in (idx_path(prefix), bin_path(prefix)):
            if not path.is_file():
                raise UserError(f"there is no token file {path}", mend="steelyard data tokenize makes a pair")
        path = idx_path(prefix)
        with open(path, "rb") as file:
            header = file.read(HEADER.size)
        if len(header) < HEADER.size or not header.startswith(MAGIC):
            raise UserError("this is not an index of token files", where=str(path))
        _, version, code, sequences, entries = HEADER.unpack(header)
        if version != 1 or code not in DTYPES:
            raise UserError(f"version {version} with dtype code {code} is not known", where=str(path))
        self.dtype = np.dtype(DTYPES[code])
        expected = HEADER.size + sequences * 12 + entries * 8
        if os.path.getsize(path) < expected:
            raise UserError(f"the index is cut short: it should hold {expected} bytes", where=str(path))
        raw = np.memmap(path, mode="r", dtype=np.uint8)
        self.lengths = _part(raw, HEADER.size, np.int32, sequences)
        self.pointers = _part(raw, HEADER.size + 4 * sequences, np.int64, sequences)
        self.document_index = _part(raw, HEADER.size + 12 * sequences, np.int64, entries)
        size = os.path.getsize(bin_path(prefix))
        needed = int(self.pointers[-1]) + int(self.lengths[-1]) * self.dtype.itemsize if sequences else 0
        if size < needed:
            raise UserError(f"holds {size} bytes, but its index needs {needed}", where=str(bin_path(prefix)))
        empty = np.empty(0, dtype=self.dtype)
        self._tokens = np.memmap(bin_path(prefix), mode="r", dtype=self.dtype) if size else empty

    def __len__(self) -> int:
        return len(self.lengths)

    def sequence(self, number: int, offset: int = 0, length: int | None = None) -> npt.NDArray[Any]:
        """The tokens of one sequence, or a part of it."""
        start = int(self.pointers[number]) // self.dtype.itemsize + offset
        return self._tokens[start : start + (int(self.lengths[number]) - offset if length is None else length)]

    def largest(self, first: int, end: int, at_most: int = 1 << 24) -> int:
        """The largest id of the sequences from `first` up to `end`, looking at no more than so many tokens."""
        start = int(self.pointers[first]) // self.dtype.itemsize
        stop = int(self.pointers[end - 1]) // self.dtype.itemsize + int(self.lengths[end - 1])
        return int(self._tokens[start : min(stop, start + at_most)].max())

    def documents(self) -> Iterator[npt.NDArray[Any]]:
        """The tokens of each document."""
        for first, end in zip(self.document_index[:-1], self.document_index[1:], strict=True):
            parts = [self.sequence(number) for number in range(first, end)]
            yield np.concatenate(parts) if parts else np.empty(0, dtype=self.dtype)


def _part(raw: npt.NDArray[np.uint8], start: int, dtype: npt.DTypeLike, count: int) -> npt.NDArray[Any]:
    # The header is 34 bytes, so the parts are unaligned; a view of the right type is still exact.
    return np.frombuffer(raw, dtype=dtype, count=count, offset=start)


def write_documents(prefix: str | Path, documents: Iterable[npt.ArrayLike], vocab_size: int) -> tuple[int, int]:
    """Write documents of ids as a pair of files; returns how many documents and tokens there were."""
    with writing(prefix, token_dtype(vocab_size)) as writer:
        for ids in documents:
            writer.add(ids)
        if not writer.tokens:
            raise UserError("the corpus is empty: there is nothing to write", where=str(bin_path(prefix)))
    return len(writer.document_ends) - 1, writer.tokens
