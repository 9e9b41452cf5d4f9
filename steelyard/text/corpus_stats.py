"""Statistics of a corpus in one pass: documents, lengths, Unicode scripts, exact duplicates, unknown characters.

Memory is bounded: characters and lengths are counted by value, and the hashes of documents go to a temporary file
(`exact_duplicates.py`).
"""

from __future__ import annotations

import tempfile
import unicodedata
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from steelyard.core import units
from steelyard.core.console import console
from steelyard.core.errors import UserError
from steelyard.text.corpus import BadDocument, CorpusChunk, DocumentMode, pieces, records, text_of, where
from steelyard.text.exact_duplicates import Duplicates, hash_of
from steelyard.text.tokenizer import Tokenizer

EXAMPLES = 5
MOST_SHOWN = 20
SENTENCEPIECE_UNKNOWN = "\u2047"  # what it decodes <unk> to
# Words before the name of the script, or instead of it, in the Unicode name of a letter.
FORMS = ("FULLWIDTH", "HALFWIDTH", "SQUARED", "CIRCLED", "PARENTHESIZED", "MATHEMATICAL")
SCRIPTS = {"CJK": "Han", "IDEOGRAPHIC": "Han", "KATAKANA-HIRAGANA": "Katakana", "GREEK": "Greek", "MODIFIER": "other"}
OTHER = {"N": "digits", "P": "punctuation", "S": "symbols", "Z": "spaces", "C": "control"}


class CorpusStats:
    """Counts of documents, added one by one."""

    def __init__(self) -> None:
        self.documents = self.bad = self.bytes = 0
        self.examples: list[str] = []
        self.lengths: Counter[int] = Counter()
        self.characters: Counter[str] = Counter()

    def add(self, text: str) -> None:
        """Add a document."""
        self.documents += 1
        self.lengths[len(text)] += 1
        self.characters.update(text)

    def add_bad(self, piece: CorpusChunk, errors: list[BadDocument]) -> None:
        """Count documents that cannot be read, and keep the first few as examples."""
        self.bad += len(errors)
        for error in errors[: EXAMPLES - len(self.examples)]:
            self.examples.append(f"{where(piece, error.number)}: {error.reason}")

    def result(self) -> dict[str, Any]:
        """The counts so far."""
        total = sum(self.characters.values())
        scripts: Counter[str] = Counter()
        for character, count in self.characters.items():
            scripts[script_of(character)] += count
        return {
            "documents": self.documents,
            "empty": self.lengths[0],
            "unreadable": {"documents": self.bad, "examples": self.examples},
            "characters": total,
            "lengths": _lengths(self.lengths, total),
            "histogram": _histogram(self.lengths),
            "scripts": {name: count / total for name, count in scripts.most_common()},
        }


def stats(
    paths: list[Path], mode: DocumentMode = "line", key: str = "text", tokenizer: Tokenizer | None = None
) -> dict[str, Any]:
    """Statistics of the documents of files; documents that cannot be read are only counted."""
    counted = CorpusStats()
    with tempfile.TemporaryDirectory(prefix="steelyard-stats-") as folder:
        hashes = Path(folder) / "hashes"
        size = sum(path.stat().st_size for path in paths)
        with open(hashes, "wb") as file, console.progress("stats", size, "B") as progress:
            for path in paths:
                for piece in pieces(path, mode):
                    file.writelines(map(hash_of, _texts(piece, key, counted)))
                    progress.advance(piece.file_bytes, note=f"{units.count(counted.documents)} documents")
        if not counted.documents + counted.bad:
            raise UserError("the corpus is empty: no documents to count")
        duplicates = Duplicates(hashes, Path(folder) / "duplicates").count
    result = {"files": len(paths), "bytes": size, **counted.result()}
    result["duplicates"] = {"documents": duplicates, "share": duplicates / max(counted.documents, 1)}
    if tokenizer is not None:
        result["unknown"] = unknown_characters(counted.characters, tokenizer)
    return result


def _texts(piece: CorpusChunk, key: str, counted: CorpusStats) -> Iterator[str]:
    unparsed: list[BadDocument] = []
    without: list[BadDocument] = []
    try:
        for number, record in enumerate(records(piece, unparsed)):
            try:
                text = text_of(record, key, number + len(unparsed))
            except BadDocument as error:
                without.append(error)
                continue
            counted.add(text)
            yield text
    except BadDocument as error:  # A damaged row group, whose other rows cannot be read.
        unparsed.append(error)
    counted.add_bad(piece, sorted([*unparsed, *without], key=lambda error: error.number))


@cache
def script_of(character: str) -> str:
    """The script of a letter by its Unicode name, `combining marks`, or the kind of another character."""
    category = unicodedata.category(character)
    if category[0] in OTHER:
        return OTHER[category[0]]
    words = unicodedata.name(character, "unknown").split()
    if words[0] == "COMBINING":
        return "combining marks"
    while words[0] in FORMS and len(words) > 1:
        words.pop(0)
    return SCRIPTS.get(words[0], words[0].capitalize())


def unknown_characters(characters: Counter[str], tokenizer: Tokenizer) -> dict[str, Any]:
    """The characters that a tokenizer has no token for: alone they decode to nothing, or to an unknown token."""
    marks = {tokenizer.special("unk_token"), SENTENCEPIECE_UNKNOWN, "<unk>", "[UNK]"}
    unknown: Counter[str] = Counter()
    for character, count in characters.items():
        if script_of(character) in ("spaces", "control") or character in marks:
            continue
        decoded = tokenizer.decode(tokenizer.encode(character)).strip()
        if not decoded or decoded in marks:
            unknown[character] = count
    total = unknown.total()
    return {
        "tokenizer": tokenizer.source,
        "characters": total,
        "share": total / max(characters.total(), 1),
        "distinct": len(unknown),
        "most_common": [[character, count] for character, count in unknown.most_common(MOST_SHOWN)],
    }


def _lengths(lengths: Counter[int], total: int) -> dict[str, float]:
    """Characters per document: exact, from the counts of each length."""
    documents, ordered = lengths.total(), sorted(lengths)
    if not documents:
        return {}
    wanted = {"median": 0.5, "90%": 0.9, "99%": 0.99}
    found: dict[str, float] = {"least": ordered[0], "mean": total / documents}
    seen = 0
    for length in ordered:
        seen += lengths[length]
        for name, share in wanted.items():
            if name not in found and seen >= share * documents:
                found[name] = length
    return found | {"most": ordered[-1]}


def _histogram(lengths: Counter[int]) -> dict[str, int]:
    """The number of documents by length in characters, in powers of two."""
    classes: Counter[int] = Counter()
    for length, count in lengths.items():
        classes[length.bit_length()] += count
    return {f"{1 << c >> 1} to {(1 << c) - 1}" if c else "0": classes[c] for c in sorted(classes)}


def as_text(result: dict[str, Any]) -> str:
    """The statistics as text."""
    bad, lengths = result["unreadable"], result["lengths"]
    rows = {
        "files": f"{result['files']}, {units.size(result['bytes'])}",
        "documents": f"{result['documents']}, of which {result['empty']} empty",
        "unreadable": f"{bad['documents']} documents" if bad["documents"] else "none",
        "duplicates": f"{result['duplicates']['documents']} documents ({result['duplicates']['share']:.2%})",
        "characters": f"{result['characters']}",
        "per document": ", ".join(f"{name} {value:.0f}" for name, value in lengths.items()),
        "scripts": ", ".join(f"{name} {share:.2%}" for name, share in list(result["scripts"].items())[:12]),
    }
    if "unknown" in result:
        unknown = result["unknown"]
        examples = ", ".join(f"{character} {count}" for character, count in unknown["most_common"][:10])
        rows["unknown"] = f"{unknown['characters']} characters ({unknown['share']:.2%}) of {unknown['distinct']} kinds"
        rows["unknown"] += f": {examples}" if examples else ""
    lines = [f"{name:13} {value}" for name, value in rows.items()]
    return "\n".join([*lines, *(f"  unreadable: {example}" for example in bad["examples"])])
