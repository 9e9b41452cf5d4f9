"""Count unknown tokens: text outside the vocabulary, of which a model sees only that something was there.

A few unknown characters are normal. Many mean that the tokenizer does not know the script of the text, and that a model
cannot learn it: above 0.1% of the tokens there is a warning, above 5% an error, unless the user allows it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from steelyard.core.console import console
from steelyard.core.errors import UserError
from steelyard.text.tokenizer.tokenizer import Tokenizer

WARN_ABOVE, ERROR_ABOVE = 0.001, 0.05  # shares of the tokens
TEXTS_AT_ONCE = 256
CHARACTERS_SHOWN = 20


class TooManyUnknownError(UserError):
    """More unknown tokens than a model can learn with."""


def count_unknown(ids: npt.NDArray[Any], tokenizer: Tokenizer) -> int:
    """The number of unknown tokens."""
    return 0 if tokenizer.unknown_id is None else int(np.count_nonzero(ids == tokenizer.unknown_id))


def described(unknown: int, tokens: int) -> str:
    """The counts in words."""
    return f"{unknown} of {tokens} tokens ({unknown / max(tokens, 1):.2%}) are unknown"


def report_unknown(unknown: int, tokens: int, tokenizer: Tokenizer, where: str | None, allowed: bool) -> None:
    """Warn above 0.1% unknown tokens; raise above 5% unless `allowed`."""
    if tokenizer.drops_unknown:
        console.warn(f"{tokenizer.source} has no unknown token: it drops characters outside its vocabulary")
    message = f"{described(unknown, tokens)} to the tokenizer {tokenizer.source}"
    if unknown > ERROR_ABOVE * tokens and not allowed:
        raise TooManyUnknownError(
            message, where=where,
            hint="use a tokenizer trained on such text (steelyard tokenizer info --text shows why), or --allow-unknown",
        )  # fmt: skip
    if unknown > WARN_ABOVE * tokens:
        console.warn(message)


def survey(tokenizer: Tokenizer, texts: Iterable[str], advance: Callable[[float], None]) -> dict[str, Any]:
    """Counts over texts, and the most frequent characters of unknown tokens."""
    tokens = unknown = characters = 0
    frequent: Counter[str] = Counter()
    texts = iter(texts)
    while batch := list(islice(texts, TEXTS_AT_ONCE)):
        for text, ids in zip(batch, tokenizer.encode_batch(batch), strict=True):
            found = count_unknown(ids, tokenizer)
            if found:
                located, spans = tokenizer.located(text)
                lost = (span for id_, span in zip(located, spans, strict=True) if id_ == tokenizer.unknown_id)
                frequent.update(character for first, end in lost for character in text[first:end])
            tokens, unknown, characters = tokens + len(ids), unknown + found, characters + len(text)
            advance(len(text.encode("utf-8", "replace")) + 1)
    return {
        "characters": characters,
        "tokens": tokens,
        "unknown": unknown,
        "unknown_share": round(unknown / max(tokens, 1), 6),
        "unknown_characters": dict(frequent.most_common(CHARACTERS_SHOWN)),
    }
