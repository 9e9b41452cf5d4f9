"""Read documents from corpus files.

A file is split between documents into chunks of some megabytes, so that many processes can share it and a killed job
can be resumed. The boundaries depend only on the file and the chunk size. A chunk of an uncompressed file is a byte
range, which the worker reads; a chunk of a compressed file contains its bytes; a chunk of a parquet file is a row
group.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from glob import glob
from itertools import chain
from pathlib import Path
from typing import IO, Any, Literal

from steelyard.core.errors import UserError
from steelyard.text.formats import (
    BASES,
    COMPRESSIONS,
    CorpusFormat,
    decompressing,
    format_of,
    on_disk,
    open_corpus,
    reading,
)

DocumentMode = Literal["line", "blank", "file"]
PIECE_BYTES = 16 << 20
ROWS_AT_ONCE = 1024


@dataclass(frozen=True)
class CorpusChunk:
    """Some whole documents of one file. `start` and `end` are offsets in the decompressed text, or row groups."""

    path: Path
    format: CorpusFormat
    mode: DocumentMode
    start: int
    end: int
    file_bytes: int
    """Bytes of the file that were read for it, for progress."""
    data: bytes | None = None
    unpacked: Path | None = None


@dataclass(frozen=True)
class BadDocument(Exception):
    """A document that cannot be read: its number in the chunk, and the reason."""

    number: int
    reason: str


def named_files(names: Iterable[str]) -> list[Path]:
    """The files of names and patterns, in order. Each name must be an existing file."""
    paths: list[Path] = []
    for name in names:
        matches = [name] if Path(name).is_file() else sorted(glob(name, recursive=True))
        matched = [Path(match) for match in matches if match == name or not Path(match).is_dir()]
        if not matched:
            raise UserError(f"there is no file {name}")
        for path in matched:
            if not path.is_file():
                raise UserError(f"{path} is not a file" + (", but a folder" if path.is_dir() else ""))
        paths += matched
    return paths


def corpus_files(names: Iterable[str]) -> dict[str, Path]:
    """The files of names, patterns and folders, in order, by their name in a copy of the corpus.

    A folder stands for all files in it, at any depth, whose names have a known format.
    """
    found: dict[str, Path] = {}
    for name in names:
        folder = Path(name)
        if folder.is_dir():
            paths = sorted(path for path in folder.rglob("*") if path.is_file() and _is_corpus(path, folder))
            named = {str(path.relative_to(folder)): path for path in paths}
            if not named:
                raise UserError(f"the folder {name} has no .txt, .jsonl or .parquet files")
        else:
            named = {path.name: path for path in named_files([name])}
        for own, path in named.items():
            if own in found:
                raise UserError(f"{found[own]} and {path} have the same name", hint="give the folder above both")
            format_of(path)
            found[own] = path
    return found


def _is_corpus(path: Path, folder: Path) -> bool:
    if any(part.startswith(".") for part in path.relative_to(folder).parts):
        return False
    return (path.with_suffix("") if path.suffix in COMPRESSIONS else path).suffix in BASES


def pieces(path: Path, mode: DocumentMode = "line", size: int = PIECE_BYTES) -> Iterator[CorpusChunk]:
    """Split a file into chunks."""
    format_ = format_of(path)
    if format_.base == "parquet":
        yield from _row_groups(path, format_)
        return
    mode = "line" if format_.base == "jsonl" else mode
    with open_corpus(path) as raw, decompressing(raw, path, format_.compression) as file:
        if format_.compression or mode == "file":
            start = read = 0
            while data := _next_block(file, mode, size):
                read, before = raw.tell(), read
                yield CorpusChunk(path, format_, mode, start, start + len(data), read - before, data)
                start += len(data)
        else:
            total, start = path.stat().st_size, 0
            while start < total:
                file.seek(min(start + size, total) - 1)
                end = file.tell() + len(_to_next_document(file, mode))
                yield CorpusChunk(path, format_, mode, start, end, end - start)
                start = end


def records(piece: CorpusChunk, bad: list[BadDocument] | None = None) -> Iterator[dict[str, Any]]:
    """The documents of a chunk as objects; plain text has the key `text`.

    A document that cannot be read raises `BadDocument`, or is added to the list `bad` if there is one.
    """
    if piece.format.base == "parquet":
        yield from _rows(piece)
        return
    for number, raw in enumerate(raw_documents(piece)):
        try:
            yield _parsed(raw, piece.format, number, whole=piece.mode == "file")
        except BadDocument as error:
            if bad is None:
                raise
            bad.append(error)


def text_of(record: dict[str, Any], key: str, number: int) -> str:
    """The text under a key."""
    text = record.get(key)
    if not isinstance(text, str):
        kind = "no" if key not in record else f"a {type(text).__name__}, not"
        raise BadDocument(number, f"there is {kind} text under the key {key!r}")
    return text


def documents(paths: Iterable[Path], key: str = "text", mode: DocumentMode = "line") -> Iterator[str]:
    """The text of every document of the files, in order. An unreadable document is an error with file and line."""
    for path in paths:
        for piece in pieces(path, mode):
            try:
                for number, record in enumerate(records(piece)):
                    yield text_of(record, key, number)
            except BadDocument as error:
                raise bad_document_error(piece, error) from None


def bad_document_error(piece: CorpusChunk, error: BadDocument, hint: str | None = None) -> UserError:
    """The error for a bad document, with its file, line and reason."""
    return UserError(error.reason, where=where(piece, error.number), hint=hint)


def where(piece: CorpusChunk, number: int) -> str:
    """The file and line of a document of a chunk. This counts the lines before it, so it is slow."""
    if piece.format.base == "parquet":
        return f"{piece.path}: row group {piece.start}, row {number}"
    if piece.mode == "file":
        return str(piece.path)
    with reading(piece.path, piece.format.compression) as file:
        before, left = 0, piece.start
        while left and (block := file.read(min(left, 1 << 20))):
            before, left = before + block.count(b"\n"), left - len(block)
    if piece.mode == "blank":
        return f"{piece.path}: document {number + 1} after line {before}"
    return f"{piece.path}:{before + number + 1}"


def _next_block(file: IO[bytes], mode: DocumentMode, size: int) -> bytes:
    if mode == "file":
        return file.read()
    block = file.read(size)
    return block + _to_next_document(file, mode, block[-2:]) if block else b""


def _to_next_document(file: IO[bytes], mode: DocumentMode, before: bytes = b"") -> bytes:
    """The rest of the document at the current position of the file."""
    if mode == "line":
        return b"" if before.endswith(b"\n") else file.readline()
    lines = [b"" if before.endswith(b"\n") else file.readline()]
    while (line := file.readline()) and line.strip():
        lines.append(line)
    return b"".join([*lines, line])


def raw_documents(piece: CorpusChunk) -> Iterator[bytes]:
    """The documents of a chunk of txt or jsonl as they are in the file; a line has its line break."""
    if piece.mode == "file":
        return iter([piece.data or b""])
    lines = _lines(piece.path, piece.start, piece.end) if piece.data is None else iter(io.BytesIO(piece.data))
    return lines if piece.mode == "line" else _paragraphs(lines)


def _lines(path: Path, start: int, end: int) -> Iterator[bytes]:
    with open(path, "rb", buffering=1 << 18) as file:
        file.seek(start)
        left = end - start
        for line in file:
            yield line
            left -= len(line)
            if left <= 0:
                return


def _paragraphs(lines: Iterable[bytes]) -> Iterator[bytes]:
    """Paragraphs: runs of lines between blank lines."""
    run: list[bytes] = []
    for line in chain(lines, [b""]):
        if line.strip():
            run.append(line.removesuffix(b"\n").removesuffix(b"\r"))
        elif run:
            yield b"\n".join(run)
            run = []


def _parsed(raw: bytes, format_: CorpusFormat, number: int, whole: bool) -> dict[str, Any]:
    if format_.base == "txt":
        try:
            return {"text": (raw if whole else raw.removesuffix(b"\n").removesuffix(b"\r")).decode("utf-8")}
        except UnicodeDecodeError as error:
            raise BadDocument(number, f"byte {error.start} is not UTF-8") from None
    import orjson

    try:
        record = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        empty = "the line is empty" if not raw.strip() else f"this is not JSON: {error}"
        raise BadDocument(number, empty) from None
    if not isinstance(record, dict):
        raise BadDocument(number, f"this is a JSON {type(record).__name__}, not an object on a line of its own")
    return record


def _row_groups(path: Path, format_: CorpusFormat) -> Iterator[CorpusChunk]:
    import pyarrow
    from pyarrow import parquet

    with reading(path, ""), on_disk(path, format_.compression) as unpacked:
        try:
            groups = parquet.ParquetFile(unpacked).num_row_groups
        except (pyarrow.ArrowException, OSError) as error:
            raise UserError(f"this is not a parquet file: {error}", where=str(path)) from None
        size = path.stat().st_size
        for group in range(groups):
            share = size * (group + 1) // groups - size * group // groups
            yield CorpusChunk(path, format_, "line", group, group + 1, share, unpacked=unpacked)


def _rows(piece: CorpusChunk) -> Iterator[dict[str, Any]]:
    import pyarrow
    from pyarrow import parquet

    number = 0
    try:
        file = parquet.ParquetFile(piece.unpacked, page_checksum_verification=True)
        for batch in file.iter_batches(ROWS_AT_ONCE, row_groups=[piece.start]):
            for row in batch.to_pylist():
                yield row
                number += 1
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise BadDocument(number, f"the parquet data is damaged: {error}") from None
