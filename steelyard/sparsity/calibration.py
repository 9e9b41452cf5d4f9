"""Calibration data for pruning: windows of tokens at random positions of a text or of token files.

Each window starts at a random token, regardless of document boundaries. A text is read from its start, at most sixteen
characters for each token of the windows (at least four million).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from steelyard.checkpoint.formats import CheckpointSource
from steelyard.checkpoint.formats.hf_config import positions_of
from steelyard.core.console import console
from steelyard.core.errors import UserError
from steelyard.text import tokenizer as tokenizers
from steelyard.text.corpus import documents, named_files
from steelyard.text.formats import format_of, reading
from steelyard.text.tokenizer import Tokenizer
from steelyard.tokens.indexed_dataset import IndexedTokens, idx_path

LONGEST = 4096  # The default length of windows, if the model supports it.
CHARACTERS_A_TOKEN = 16
FEWEST_CHARACTERS = 4_000_000
JOIN = "\n\n"


@dataclass(frozen=True)
class Calibration:
    """The requested calibration data: `samples` windows of `length` tokens."""

    data: str
    samples: int = 128
    length: int | None = None
    seed: int = 0


@dataclass(frozen=True)
class Windows:
    """Rows of tokens, and a description of their origin."""

    tokens_BL: Tensor
    described: str


def is_prefix(data: str) -> bool:
    """Whether a name is a pair of token files."""
    return data.endswith((".idx", ".bin")) or idx_path(data).is_file()


def windows_of(source: CheckpointSource, request: Calibration, tokenizer_path: str | None) -> Windows:
    """Draw the windows for a checkpoint; as long as it supports, if the request has no length."""
    positions = positions_of(source.config, source.hf_metadata)
    length = request.length or min(LONGEST, positions)
    if length > positions:
        if source.config.blocks.positions is not None:
            raise UserError(
                f"windows of {length} tokens are longer than the model's {positions} positions",
                where="--sequence-length",
                hint=f"use {positions} or less",
            )
        console.warn(f"windows of {length} tokens are longer than the model's context of {positions}")
    tokenizer = None
    if not is_prefix(request.data) and (tokenizer_path or source.tokenizer):
        tokenizer = tokenizers.load_tokenizer(tokenizer_path) if tokenizer_path else source.load_tokenizer()
    return windows(replace(request, length=length), tokenizer, source.config.vocab)


def windows(request: Calibration, tokenizer: Tokenizer | None, vocab: int) -> Windows:
    """Draw the windows. Token files need no tokenizer."""
    length = request.length or LONGEST
    if is_prefix(request.data):
        files = IndexedTokens(request.data)
        stream = files.stream(0, int(files.lengths.sum(dtype=np.int64)))
        described = f"token files {files.prefix}"
    else:
        if tokenizer is None:
            raise UserError("a text needs a tokenizer, and the checkpoint has none", hint="give one with --tokenizer")
        text, whole = _text(request)
        stream = np.asarray(tokenizer.framed(text), dtype=np.int64)
        described = f"{request.data}, {'all' if whole else 'the first'} {len(stream)} tokens"
    if len(stream) < 2:
        raise UserError(f"{request.data} has fewer than two tokens", where="--calibration", hint="give another text")
    if len(stream) < length:
        raise UserError(
            f"{request.data} has {len(stream)} tokens, fewer than one window of {length}",
            where="--calibration",
            hint=f"use --sequence-length {len(stream)} or less, or more text",
        )
    starts = np.random.RandomState(request.seed).randint(0, len(stream) - length + 1, request.samples)
    rows: npt.NDArray[Any] = np.stack([stream[start : start + length] for start in starts]).astype(np.int64)
    if rows.max() >= vocab:
        raise UserError(
            f"{request.data} contains token id {rows.max()}, but the model's vocabulary has {vocab}",
            where="--calibration",
            hint="use the tokenizer that the model was trained with",
        )
    return Windows(torch.from_numpy(rows), f"{request.samples} windows of {length} tokens from {described}")


def _text(request: Calibration) -> tuple[str, bool]:
    """The start of a text, and whether that is the whole text."""
    most = max(FEWEST_CHARACTERS, CHARACTERS_A_TOKEN * request.samples * (request.length or LONGEST))
    paths = named_files([request.data])
    plain = all(format_of(path).base == "txt" for path in paths)
    texts = (_beginning(path, most + 1) for path in paths) if plain else documents(paths)
    gathered: list[str] = []
    length = 0
    for text in texts:
        gathered.append(text)
        length += len(text) + len(JOIN)
        if length > most:
            break
    joined = JOIN.join(gathered)
    return joined[:most], len(joined) <= most


def _beginning(path: Path, most: int) -> str:
    with reading(path, format_of(path).compression) as file:
        data = file.read(4 * most)
    try:
        # A character that the limit splits is dropped.
        return data.decode("utf-8", errors="ignore" if len(data) == 4 * most else "strict")
    except UnicodeDecodeError as error:
        raise UserError(f"byte {error.start} is not valid UTF-8", where=str(path)) from None
