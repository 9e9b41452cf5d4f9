"""Describe and verify token files."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from steelyard.core import units
from steelyard.core.console import console
from steelyard.core.errors import RuntimeFailure, UserError
from steelyard.tokens import checksums
from steelyard.tokens.indexed_dataset import IndexedTokens, bin_path, idx_path

SHOWN_TOKENS = 60
TOKENS_AT_ONCE = 1 << 22


def summary(prefix: str) -> dict[str, Any]:
    """The size and dtype of a pair of token files."""
    tokens = IndexedTokens(prefix)
    return {
        "prefix": tokens.prefix,
        "documents": len(tokens.document_index) - 1,
        "sequences": len(tokens),
        "tokens": int(tokens.lengths.sum(dtype=np.int64)),
        "dtype": tokens.dtype.name,
    }


def describe(prefix: str, decode: Callable[[Iterable[int]], str] | None = None) -> dict[str, Any]:
    """Describe a pair of token files: its size, the lengths of its sequences, and its first tokens."""
    tokens = IndexedTokens(prefix)
    result = summary(prefix) | {
        "size": units.size(bin_path(tokens.prefix).stat().st_size),
        "shortest": int(tokens.lengths.min()) if len(tokens) else 0,
        "mean": round(float(tokens.lengths.mean()), 1) if len(tokens) else 0.0,
        "longest": int(tokens.lengths.max(initial=0)),
        "histogram": _histogram(tokens),
    }
    if len(tokens):
        first = tokens.sequence(0)[:SHOWN_TOKENS].tolist()
        result["sample"] = decode(first) if decode else first
    return result


def histogram_lines(histogram: dict[str, int]) -> list[str]:
    """A histogram as bars of text."""
    most = max(histogram.values(), default=0)
    return [f"{span:>17} {number:>12} {'#' * round(40 * number / most)}" for span, number in histogram.items()]


def verify(prefix: str, vocab_size: int | None = None, unknown_id: int | None = None) -> dict[str, Any]:
    """Check the index, all checksums and, with `vocab_size`, that every id is below it; count the unknown tokens."""
    try:
        tokens = IndexedTokens(prefix)
    except UserError as error:
        pair = prefix.removesuffix(".idx").removesuffix(".bin")
        exists = all(path(pair).exists() for path in (bin_path, idx_path))
        raise RuntimeFailure(error.message, where=error.where, hint=error.hint) if exists else error from None
    total = int(tokens.lengths.sum(dtype=np.int64))
    try:
        has_checksums = checksums.check(tokens.prefix, everything=True)
    except UserError as error:
        raise RuntimeFailure(error.message, where=error.where, hint=error.hint) from None
    unknown = 0 if vocab_size is None else _checked_ids(tokens, total, vocab_size, unknown_id)
    documents = len(tokens.document_index) - 1
    return {
        "prefix": prefix,
        "valid": True,
        "documents": documents,
        "tokens": total,
        "unknown": unknown,
        "checksums": has_checksums,
    }


def _checked_ids(tokens: IndexedTokens, total: int, vocab_size: int, unknown_id: int | None) -> int:
    """Raise if an id is outside the vocabulary; return the number of unknown tokens."""
    unknown = 0
    with console.progress("verify", total, "tokens") as progress:
        for start in range(0, total, TOKENS_AT_ONCE):
            part = tokens.stream(start, min(start + TOKENS_AT_ONCE, total))
            if part.max() >= vocab_size or part.min() < 0:
                wrong = int(part[(part >= vocab_size) | (part < 0)][0])
                position = start + int(np.flatnonzero((part >= vocab_size) | (part < 0))[0])
                message = f"token {position} has the id {wrong}, outside the vocabulary of {vocab_size}"
                raise RuntimeFailure(message, where=tokens.prefix)
            unknown += 0 if unknown_id is None else int(np.count_nonzero(part == unknown_id))
            progress.advance(len(part))
    return unknown


def _histogram(tokens: IndexedTokens) -> dict[str, int]:
    """The number of sequences by length, in powers of two."""
    if not len(tokens):
        return {}
    classes = np.bincount(np.frexp(tokens.lengths.astype(np.float64))[1])
    return {f"{1 << (c - 1)} to {(1 << c) - 1}": int(number) for c, number in enumerate(classes) if number}
