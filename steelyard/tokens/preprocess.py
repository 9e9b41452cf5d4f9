"""Documents to token files, given something that turns text into ids."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from steelyard.tokens.indexed import write_documents

DOCUMENTS_AT_ONCE = 256


def tokenize(
    documents: Iterable[str],
    encode_batch: Callable[[Sequence[str]], list[list[int]]],
    end_of_document: int,
    vocab_size: int,
    prefix: str,
) -> dict[str, Any]:
    """Write `<prefix>.bin` and `.idx`, each document closed by the end-of-document id."""

    def closed() -> Iterator[list[int]]:
        iterator = iter(documents)
        while texts := list(islice(iterator, DOCUMENTS_AT_ONCE)):
            for ids in encode_batch(texts):
                yield [*ids, end_of_document]

    count, tokens = write_documents(prefix, closed(), vocab_size)
    return {"prefix": prefix, "documents": count, "tokens": tokens}
