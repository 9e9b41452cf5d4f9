"""Join encoded chunks into a pair of token files, and several pairs into one, without loading them into memory.

The index needs only the lengths of the documents, four bytes each. They are read once for each of its three parts.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from steelyard.core import files
from steelyard.core.console import console
from steelyard.core.errors import UserError
from steelyard.tokens import checksums
from steelyard.tokens.indexed_dataset import CODES, HEADER, MAGIC, IndexedTokens, bin_path, idx_path
from steelyard.tokens.inspect import verify

COPY_BYTES = 1 << 26
Lengths = npt.NDArray[np.int32]


class Joiner:
    """Appends encoded chunks to the .bin of a pair, in order; documents without tokens keep their entry in the index.

    With `fixed_length` the joined stream is split into documents of that many tokens plus one, which is the first
    token of the next document.
    """

    def __init__(self, file: IO[bytes], dtype: np.dtype[Any], fixed_length: int | None) -> None:
        self._file, self.dtype, self.fixed_length = file, dtype, fixed_length
        self._parts: list[Path] = []
        self._left = np.empty(0, dtype=dtype)
        self._windows = 0

    def append(self, part: Path) -> None:
        """Add a chunk: `part` has its tokens, the file next to it the length of each document."""
        self._parts.append(part)
        if self.fixed_length is None:
            _append(part, self._file)
        else:
            self._append_windows(np.fromfile(part, dtype=self.dtype), self.fixed_length)

    def lengths(self) -> Iterator[Lengths]:
        """The length of each document, chunk by chunk."""
        if self.fixed_length is not None:
            yield np.full(self._windows, self.fixed_length + 1, dtype=np.int32)
            return
        for part in self._parts:
            yield np.fromfile(part.with_suffix(".lengths"), dtype=np.int32)

    def dropped(self) -> dict[str, int]:
        """The number of tokens at the end that do not fill a window, without the last label of the last window."""
        return {} if self.fixed_length is None else {"dropped_tokens": max(0, len(self._left) - 1)}

    def _append_windows(self, tokens: npt.NDArray[Any], length: int) -> None:
        stream = np.concatenate([self._left, tokens])
        count = max(0, (len(stream) - 1) // length)
        if count:
            windows = np.lib.stride_tricks.sliding_window_view(stream, length + 1)[: count * length : length]
            self._file.write(np.ascontiguousarray(windows).tobytes())
        self._windows, self._left = self._windows + count, stream[count * length :]


@contextlib.contextmanager
def joining(prefix: str, dtype: np.dtype[Any], fixed_length: int | None = None) -> Iterator[Joiner]:
    """Join chunks into a pair of files, which is created when the block ends without an error."""
    for stale in (idx_path(prefix), checksums.path_of(prefix)):
        stale.unlink(missing_ok=True)
    with files.atomic_file(bin_path(prefix), "wb") as file:
        joiner = Joiner(file, dtype, fixed_length)
        yield joiner
        if not any(lengths.any() for lengths in joiner.lengths()):
            raise UserError(f"the corpus is empty or too short: nothing to write to {bin_path(prefix)}")
    write_index(prefix, joiner.lengths, dtype, with_checksums=True)


def merge(prefixes: list[str], prefix: str) -> dict[str, Any]:
    """Join several pairs of token files into one, in order."""
    for name in prefixes:
        verify(name)
    datasets = [IndexedTokens(name) for name in prefixes]
    dtype = datasets[0].dtype
    for dataset in datasets:
        if dataset.dtype != dtype:
            raise UserError(
                f"{dataset.prefix} has dtype {dataset.dtype}, but {datasets[0].prefix} has {dtype}",
                hint="the pairs use different vocabularies and cannot be merged",
            )

    def lengths() -> Iterator[Lengths]:
        for dataset in datasets:
            yield dataset.document_lengths()

    if idx_path(prefix).exists():
        raise UserError(f"{idx_path(prefix)} already exists", hint="choose another prefix")
    checksums.path_of(prefix).unlink(missing_ok=True)
    total = sum(bin_path(dataset.prefix).stat().st_size for dataset in datasets)
    with files.atomic_file(bin_path(prefix), "wb") as target, console.progress("merge", total, "B") as progress:
        for dataset in datasets:
            _append(bin_path(dataset.prefix), target, progress.advance)
    written = write_index(prefix, lengths, dtype, with_checksums=True)
    return {"prefix": prefix, **written}


def write_index(
    prefix: str, lengths: Callable[[], Iterator[Lengths]], dtype: np.dtype[Any], with_checksums: bool = False
) -> dict[str, Any]:
    """Write the .idx of documents of the given lengths, one sequence each. Renamed last, it marks the pair complete."""
    documents = sequences = tokens = 0
    for part in lengths():
        documents += len(part)
        sequences += int(np.count_nonzero(part))
        tokens += int(part.sum(dtype=np.int64))
    with files.atomic_file(idx_path(prefix), "wb") as index:
        index.write(HEADER.pack(MAGIC, 1, CODES[dtype], sequences, documents + 1))
        for part in lengths():
            index.write(part[part > 0].tobytes())
        _write_offsets(index, (part[part > 0] for part in lengths()), dtype.itemsize)
        index.write(np.zeros(1, dtype=np.int64).tobytes())
        _write_ends(index, (part > 0 for part in lengths()))
        if with_checksums:
            index.flush()
            checksums.write(prefix, Path(index.name))
    return {"documents": documents, "sequences": sequences, "tokens": tokens, "dtype": dtype.name}


def _append(path: Path, target: IO[bytes], advance: Callable[[float], None] = lambda amount: None) -> None:
    """Append a file to another in the kernel, or through memory if that is not possible."""
    with open(path, "rb") as source:
        target.flush()
        if not _copied_in_kernel(source, target, advance):
            while block := source.read(COPY_BYTES):
                target.write(block)
                advance(len(block))


def _copied_in_kernel(source: IO[bytes], target: IO[bytes], advance: Callable[[float], None]) -> bool:
    """Copy in the kernel and return whether it worked; macOS and some file systems do not support it."""
    if not hasattr(os, "copy_file_range"):
        return False
    try:
        while count := os.copy_file_range(source.fileno(), target.fileno(), COPY_BYTES):
            advance(count)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
        return False
    return True


def _write_offsets(index: IO[bytes], parts: Iterator[Lengths], itemsize: int) -> None:
    """Write the byte offset of each sequence."""
    start = 0
    for part in parts:
        ends = np.cumsum(part, dtype=np.int64) + start
        begins = np.concatenate([[start], ends[:-1]]) if len(ends) else ends
        index.write((begins.astype(np.int64) * itemsize).tobytes())
        start = int(ends[-1]) if len(ends) else start


def _write_ends(index: IO[bytes], parts: Iterator[npt.NDArray[np.bool_]]) -> None:
    """Write the number of sequences up to the end of each document."""
    seen = 0
    for part in parts:
        ends = np.cumsum(part, dtype=np.int64) + seen
        index.write(ends.tobytes())
        seen = int(ends[-1]) if len(ends) else seen
