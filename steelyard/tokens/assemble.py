"""Joining encoded pieces into a pair of token files, and pairs into one, without holding them in memory.

What the index needs of a piece is the length of each of its documents, four bytes each: they are read once for each
of the index's three parts.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from steelyard.core import files
from steelyard.core.errors import UserError
from steelyard.tokens.indexed import CODES, HEADER, MAGIC, IndexedTokens, bin_path, idx_path

COPY_BYTES = 1 << 22
Lengths = npt.NDArray[np.int32]


def join(folder: Path, key: str, prefix: str, dtype: np.dtype[Any], fixed_length: int | None) -> dict[str, Any]:
    """Join a job's pieces; documents without tokens keep their entry and get no sequence."""
    parts = sorted(folder.glob(f"*.{key}.tokens"))

    def lengths() -> Iterator[Lengths]:
        for part in parts:
            yield np.fromfile(part.with_suffix(".lengths"), dtype=np.int32)

    idx_path(prefix).unlink(missing_ok=True)
    if fixed_length is not None:
        return _join_fixed(parts, prefix, dtype, fixed_length)
    with files.atomic_file(bin_path(prefix), "wb") as target:
        for part in parts:
            with open(part, "rb") as source:
                shutil.copyfileobj(source, target, COPY_BYTES)
    return {"prefix": prefix, **write_index(prefix, lengths, dtype)}


def merge(prefixes: list[str], prefix: str) -> dict[str, Any]:
    """Join whole pairs of token files into one, in order."""
    datasets = [IndexedTokens(name) for name in prefixes]
    dtype = datasets[0].dtype
    for dataset in datasets:
        if dataset.dtype != dtype:
            raise UserError(
                f"{dataset.prefix} holds {dataset.dtype}, but {datasets[0].prefix} holds {dtype}",
                mend="they come from different vocabularies and cannot be one dataset",
            )

    def lengths() -> Iterator[Lengths]:
        for dataset in datasets:
            yield dataset.document_lengths()

    if idx_path(prefix).exists():
        raise UserError(f"{idx_path(prefix)} is there already", mend="name another prefix")
    with files.atomic_file(bin_path(prefix), "wb") as target:
        for dataset in datasets:
            with open(bin_path(dataset.prefix), "rb") as source:
                shutil.copyfileobj(source, target, COPY_BYTES)
    return {"prefix": prefix, **write_index(prefix, lengths, dtype)}


def write_index(prefix: str, lengths: Callable[[], Iterator[Lengths]], dtype: np.dtype[Any]) -> dict[str, Any]:
    """Write the .idx of documents of the given lengths, one sequence each; it comes last and marks the pair whole."""
    documents = sequences = tokens = 0
    for part in lengths():
        documents += len(part)
        sequences += int(np.count_nonzero(part))
        tokens += int(part.sum(dtype=np.int64))
    with files.atomic_file(idx_path(prefix), "wb") as index:
        index.write(HEADER.pack(MAGIC, 1, CODES[dtype], sequences, documents + 1))
        for part in lengths():
            index.write(part[part > 0].tobytes())
        _write_running(index, (part[part > 0] for part in lengths()), dtype.itemsize)
        index.write(np.zeros(1, dtype=np.int64).tobytes())
        _write_ends(index, (part > 0 for part in lengths()))
    return {"documents": documents, "sequences": sequences, "tokens": tokens, "dtype": dtype.name}


def _write_running(index: IO[bytes], parts: Iterator[Lengths], itemsize: int) -> None:
    """Where each sequence begins, in bytes."""
    start = 0
    for part in parts:
        ends = np.cumsum(part, dtype=np.int64) + start
        begins = np.concatenate([[start], ends[:-1]]) if len(ends) else ends
        index.write((begins.astype(np.int64) * itemsize).tobytes())
        start = int(ends[-1]) if len(ends) else start


def _write_ends(index: IO[bytes], parts: Iterator[npt.NDArray[np.bool_]]) -> None:
    """How many sequences there are up to each document's end."""
    seen = 0
    for part in parts:
        ends = np.cumsum(part, dtype=np.int64) + seen
        index.write(ends.tobytes())
        seen = int(ends[-1]) if len(ends) else seen


def _join_fixed(parts: list[Path], prefix: str, dtype: np.dtype[Any], length: int) -> dict[str, Any]:
    """Cut the joined stream into documents of `length` + 1 tokens, the last of one being the first of the next."""
    left = np.empty(0, dtype=dtype)
    windows = 0
    with files.atomic_file(bin_path(prefix), "wb") as target:
        for part in parts:
            stream = np.concatenate([left, np.fromfile(part, dtype=dtype)])
            count = max(0, (len(stream) - 1) // length)
            if count:
                cuts = np.lib.stride_tricks.sliding_window_view(stream, length + 1)[: count * length : length]
                target.write(np.ascontiguousarray(cuts).tobytes())
            windows, left = windows + count, stream[count * length :]
        if not windows:
            raise UserError(f"the corpus has {len(left)} tokens, too few for one sample of {length}")

    def lengths() -> Iterator[Lengths]:
        yield np.full(windows, length + 1, dtype=np.int32)

    # One token of what is left was the last label of the last window.
    return {"prefix": prefix, **write_index(prefix, lengths, dtype), "dropped_tokens": len(left) - 1}
