"""The tokens for a perplexity measurement, from token files, text or WikiText, with a description of their source."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from steelyard.checkpoint.formats import CheckpointSource, SourceView
from steelyard.checkpoint.formats.native import SteelyardSource
from steelyard.core.errors import UserError
from steelyard.core.run import MANIFEST
from steelyard.core.safe_parse import read_json_object
from steelyard.text import download
from steelyard.text.corpus import documents, named_files
from steelyard.text.formats import format_of
from steelyard.text.tokenizer import Tokenizer
from steelyard.tokens.indexed_dataset import IndexedTokens, idx_path

# `wikitext2` is the raw text. The tokenised form replaces rare words with <unk>, which makes it easier to predict.
WIKITEXT = {"wikitext2": "wikitext-2-raw-v1", "wikitext103": "wikitext-103-raw-v1"}
FORM = re.compile(r"wikitext-(?:2|103)(-raw)?-v1")
JOIN = "\n\n"


@dataclass(frozen=True)
class TokenStream:
    """A sequence of tokens, and a description of its source."""

    tokens: npt.NDArray[Any]
    described: dict[str, str]


def is_prefix(data: str) -> bool:
    """Whether a name is the prefix of a pair of token files."""
    return data.endswith((".idx", ".bin")) or idx_path(data).is_file()


def from_token_files(prefix: str) -> TokenStream:
    """All tokens of a pair of token files, in file order."""
    files = IndexedTokens(prefix)
    total = int(files.lengths.sum(dtype=np.int64))
    described = {
        "text": f"token files {files.prefix}, {len(files.document_index) - 1} documents in file order",
        "joined": "as in the files, with their end-of-document tokens",
        "special tokens": "none added",
    }
    return TokenStream(files.stream(0, total), described)


def from_text(data: str, tokenizer: Tokenizer) -> TokenStream:
    """The tokens of a file, or of the raw test split of WikiText, encoded as one text."""
    if data in WIKITEXT:
        name = f"{WIKITEXT[data]}, test split"
        paths = download.wikitext_split(WIKITEXT[data], "test")
        whole = False
    else:
        name, paths = data, named_files([data])
        whole = all(format_of(path).base == "txt" for path in paths)
    rows = list(documents(paths, mode="file" if whole else "line"))
    tokens = np.asarray(tokenizer.framed(JOIN.join(rows)), dtype=np.int32)
    described = {
        "text": name,
        "joined": "one text" if whole and len(rows) == 1 else f"{len(rows)} rows joined by two newlines",
        "special tokens": _frame(tokenizer),
    }
    return TokenStream(tokens, described)


def _frame(tokenizer: Tokenizer) -> str:
    """A description of the special tokens that the tokenizer adds."""
    plain, framed = tokenizer.encode("a"), tokenizer.framed("a")
    if plain == framed:
        return "none: the tokenizer adds none, so the text has no BOS"
    first = next((place for place in range(len(framed)) if framed[place : place + len(plain)] == plain), 0)
    return f"as the tokenizer adds them, once: {framed[:first]} before, {framed[first + len(plain) :]} after"


def other_form(data: str, source: CheckpointSource) -> str | None:
    """A warning if the model was trained on another form of WikiText than the one it is measured on."""
    measured = _forms([WIKITEXT.get(data, data)])
    trained = _forms(_trained_on(source))
    others = trained - measured
    if not measured or not others or trained & measured:
        return None
    return (
        f"the model was trained on {', '.join(sorted(others))} and is measured on {', '.join(sorted(measured))}: "
        "one form has <unk> for rare words and the other has the raw text, so this perplexity means little"
    )


def _forms(names: Iterable[str]) -> set[str]:
    matches = (FORM.search(name) for name in names)
    return {"the raw form (-raw-v1)" if match.group(1) else "the tokenised form (-v1)" for match in matches if match}


def _trained_on(source: CheckpointSource) -> list[str]:
    """The names of a run's token files and of the texts they were made from, if known."""
    while isinstance(source, SourceView):
        source = source.origin
    if not isinstance(source, SteelyardSource) or not (source.path.parent.parent / MANIFEST).is_file():
        return []
    names = []
    for entry in source.saved.run.recipe().data.train:
        names.append(entry.prefix)
        record = Path(re.sub(r"_[^_/]+_document$", "", entry.prefix) + ".tokenize.json")
        if record.is_file():
            names += read_json_object(record)["made_of"]["inputs"]
    return names


def check_ids(stream: TokenStream, vocab: int) -> None:
    """Raise an error for tokens that have no embedding row in the model."""
    largest = int(stream.tokens.max()) if len(stream.tokens) else 0
    if largest >= vocab:
        raise UserError(
            f"the text contains the id {largest}, but the model has {vocab} ids",
            hint="use the tokenizer that the model was trained with",
        )
