"""Text that shows a model at work: windows of tokens from a text or from token files, at places that a seed chooses.

Each window begins at a random token, wherever documents begin and end. A text is taken from its beginning, and of a
long one no more than sixteen characters for each token that the windows hold (at least four million).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from steelyard.core.errors import UserError
from steelyard.text.corpus import documents, named_files
from steelyard.text.formats import format_of, reading
from steelyard.text.tokenizer import Tokenizer
from steelyard.tokens.indexed_dataset import IndexedTokens, idx_path

CHARACTERS_A_TOKEN = 16
FEWEST_CHARACTERS = 4_000_000
JOIN = "\n\n"


@dataclass(frozen=True)
class Calibration:
    """What was asked for: so many windows of so many tokens."""

    data: str
    samples: int = 128
    length: int = 4096
    seed: int = 0


@dataclass(frozen=True)
class Windows:
    """Rows of tokens, and in words where they are from."""

    tokens_BL: Tensor
    described: str


def is_prefix(data: str) -> bool:
    """Whether a name stands for a pair of token files."""
    return data.endswith((".idx", ".bin")) or idx_path(data).is_file()


def windows(asked: Calibration, tokenizer: Tokenizer | None, vocab: int) -> Windows:
    """Choose the windows. Token files need no tokenizer."""
    if is_prefix(asked.data):
        files = IndexedTokens(asked.data)
        stream = files.stream(0, int(files.lengths.sum(dtype=np.int64)))
        described = f"token files {files.prefix}"
    else:
        if tokenizer is None:
            raise UserError("a text needs a tokenizer, and the checkpoint has none", hint="name one with --tokenizer")
        text, whole = _text(asked)
        stream = np.asarray(tokenizer.framed(text), dtype=np.int64)
        described = f"{asked.data}, {'all' if whole else 'the first'} {len(stream)} tokens"
    if len(stream) < 2:
        raise UserError(f"{asked.data} holds no text to speak of", where="--calibration", hint="name another text")
    if len(stream) < asked.length:
        raise UserError(
            f"{asked.data} has {len(stream)} tokens, which do not fill one window of {asked.length}",
            where="--calibration",
            hint=f"use --sequence-length {len(stream)} or less, or more text",
        )
    starts = np.random.RandomState(asked.seed).randint(0, len(stream) - asked.length + 1, asked.samples)
    rows: npt.NDArray[Any] = np.stack([stream[start : start + asked.length] for start in starts]).astype(np.int64)
    if rows.max() >= vocab:
        raise UserError(
            f"{asked.data} holds the id {rows.max()}, but the model knows {vocab}",
            where="--calibration",
            hint="use the tokenizer that the model was trained with",
        )
    return Windows(torch.from_numpy(rows), f"{asked.samples} windows of {asked.length} tokens from {described}")


def _text(asked: Calibration) -> tuple[str, bool]:
    """The beginning of a text, and whether that is all of it."""
    most = max(FEWEST_CHARACTERS, CHARACTERS_A_TOKEN * asked.samples * asked.length)
    paths = named_files([asked.data])
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
        # A character that the limit cuts in two is left out.
        return data.decode("utf-8", errors="ignore" if len(data) == 4 * most else "strict")
    except UnicodeDecodeError as error:
        raise UserError(f"byte {error.start} is no UTF-8", where=str(path)) from None
