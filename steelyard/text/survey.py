"""A quick look at the text that a user has: its files, its size, the key of the text, and how it splits into documents.

Only the beginning of the first files is read, so that terabytes are surveyed in a second. The size of compressed text
is an estimate from typical ratios.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from glob import glob
from itertools import islice
from pathlib import Path
from typing import Any

from steelyard.core.errors import UserError
from steelyard.text.corpus import BadDocument, DocumentMode, bad_document_error, named_files, pieces, records
from steelyard.text.formats import BASES, COMPRESSIONS, format_of

ROWS, FILES, CHUNK = 200, 50, 1 << 18
EXPANSION = {"gz": 3.0, "zst": 3.0, "parquet": 2.0}  # bytes of text per byte on disk
MANY_FILES = 20  # Fewer documents cannot be split into training and validation.
SHORT_LINE = 200  # characters; longer lines are paragraphs or whole documents


@dataclass(frozen=True)
class Survey:
    """The files and the names or patterns that commands take for them, the estimated bytes of text in them, the
    text's key, the split into documents, and the first rows.
    """

    files: list[Path]
    inputs: list[str]
    bytes: int
    key: str
    mode: DocumentMode
    rows: list[dict[str, Any]]


def corpus_files(name: str) -> tuple[list[Path], list[str]]:
    """The corpus files of a file, a pattern or a folder, and the words that name them on a command line.

    Of the formats in a folder the one with the most bytes is taken.
    """
    if not Path(name).is_dir():
        return named_files([name]), [name]
    used: dict[int, list[str]] = {}
    for base in ("txt", "jsonl", "parquet"):
        # A .json beside text is usually a vocabulary or metadata.
        endings = [ending + packed for ending in BASES if BASES[ending] == base and ending != ".json"
                   for packed in ("", *COMPRESSIONS)]  # fmt: skip
        if patterns := [pattern for ending in endings if glob(pattern := str(Path(name) / f"*{ending}"))]:
            used[sum(path.stat().st_size for path in named_files(patterns))] = patterns
    if not used:
        raise UserError(f"the folder {name} has no text files", hint="text files are .txt, .jsonl or .parquet")
    return named_files(used[max(used)]), used[max(used)]


def survey(name: str) -> Survey:
    """Read the beginning of the files of a name, a pattern or a folder."""
    files, inputs = corpus_files(name)
    rows = list(islice(_rows(files[0]), ROWS))
    if not rows:
        raise UserError("the file contains no text", where=str(files[0]))
    texts = [key for key, value in rows[0].items() if isinstance(value, str)]
    key = "text" if "text" in texts or not texts else max(texts, key=lambda name: len(rows[0][name]))
    for path in files[1:FILES]:
        if key not in next(_rows(path), {key: ""}) and texts:
            raise UserError(f"its rows have no key {key!r}, as those of {files[0]} have", where=str(path))
    total = sum(path.stat().st_size * _expansion(path) for path in files)
    return Survey(files, inputs, int(total), key, _mode(files, rows), rows)


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    for piece in pieces(path, size=CHUNK):
        try:
            yield from records(piece)
        except BadDocument as error:
            raise bad_document_error(piece, error) from None


def _expansion(path: Path) -> float:
    format_ = format_of(path)
    return EXPANSION.get(format_.compression, EXPANSION.get(format_.base, 1.0))


def _mode(files: list[Path], rows: list[dict[str, Any]]) -> DocumentMode:
    """Short lines of plain text are not documents: paragraphs are, or the files, if there are many."""
    if any(format_of(path).base != "txt" for path in files):
        return "line"
    lines = [str(row["text"]).strip() for row in rows]
    filled = [len(line) for line in lines if line]
    if not filled or sum(filled) / len(filled) >= SHORT_LINE:
        return "line"
    if len(filled) < len(lines):
        return "blank"
    return "file" if len(files) >= MANY_FILES else "line"
