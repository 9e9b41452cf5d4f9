"""Convert corpora between txt, jsonl and parquet as a stream."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import IO, Any

from steelyard.core import files
from steelyard.core.console import console
from steelyard.core.errors import UserError
from steelyard.text import formats
from steelyard.text.corpus import BadDocument, DocumentMode, bad_document_error, pieces, records

ROWS_AT_ONCE = 4096


def convert(inputs: list[Path], output: Path, mode: DocumentMode = "line", key: str = "text") -> int:
    """Write all documents of the inputs to one file, and return their number.

    Between jsonl and parquet all keys are kept; in a table a missing key becomes null. A txt gets the text under `key`.
    """
    target = formats.format_of(output)
    if output.exists() and any(path.exists() and path.samefile(output) for path in inputs):
        raise UserError(f"{output} is both input and output", hint="choose another output file")
    total = sum(path.stat().st_size for path in inputs if path.is_file())
    with console.progress("convert", total, "B") as progress:
        documents = _records(inputs, mode, progress.advance)
        with files.atomic_file(output, "wb") as file, formats.writing(file, target.compression) as packed:
            if target.base == "parquet":
                count = _write_parquet(documents, packed)
            elif target.base == "jsonl":
                count = _write_jsonl(documents, packed)
            else:
                count = _write_txt(documents, packed, mode, key)
            if not count:
                raise UserError("the corpus is empty: nothing to write")
    return count


def _records(inputs: list[Path], mode: DocumentMode, advance: Any) -> Iterator[dict[str, Any]]:
    for path in inputs:
        for piece in pieces(path, mode):
            try:
                yield from records(piece)
            except BadDocument as error:
                raise bad_document_error(piece, error) from None
            advance(piece.file_bytes)


def _write_jsonl(documents: Iterable[dict[str, Any]], file: IO[bytes]) -> int:
    import orjson

    count = 0
    for count, record in enumerate(documents, start=1):  # noqa: B007
        file.write(orjson.dumps(record, default=str, option=orjson.OPT_APPEND_NEWLINE))
    return count


def _write_txt(documents: Iterable[dict[str, Any]], file: IO[bytes], mode: DocumentMode, key: str) -> int:
    end, forbidden = {"line": ("\n", "\n"), "blank": ("\n\n", "\n\n"), "file": ("", "")}[mode]
    count = 0
    for count, record in enumerate(documents, start=1):
        text = record.get(key)
        if not isinstance(text, str):
            raise UserError(
                f"document {count} has no text under the key {key!r}", hint="pass another key with --json-key"
            )
        if mode == "file" and count > 1:
            raise UserError("with --document file a txt has one document, but there are more")
        if forbidden and forbidden in text:
            what = "a line break" if mode == "line" else "an empty line"
            raise UserError(
                f"document {count} contains {what}, which separates documents with --document {mode}",
                hint="write .jsonl or .parquet" + (", or pass --document blank" if mode == "line" else ""),
            )
        file.write((text + end).encode("utf-8"))
    return count


def _write_parquet(documents: Iterator[dict[str, Any]], file: IO[bytes]) -> int:
    import pyarrow
    from pyarrow import parquet

    count, writer = 0, None
    # A parquet file is not written sequentially, so it is completed on disk before it is compressed.
    with tempfile.NamedTemporaryFile() as whole, contextlib.ExitStack() as stack:
        while rows := list(islice(documents, ROWS_AT_ONCE)):
            keys = dict.fromkeys(key for row in rows for key in row)
            late = [key for key in keys if writer is not None and key not in writer.schema.names]
            if late:
                raise UserError(
                    f"the key {late[0]!r} first appears after document {count}, when the columns are already fixed",
                    hint="write .jsonl, whose objects may differ, or add the key to every object",
                )
            try:
                columns = {key: [row.get(key) for row in rows] for key in (writer.schema.names if writer else keys)}
                table = pyarrow.Table.from_pydict(columns, schema=writer.schema if writer else None)
            except pyarrow.ArrowException as error:
                raise UserError(f"documents {count + 1} to {count + len(rows)} do not fit one table: {error}") from None
            if writer is None:
                writer = stack.enter_context(
                    parquet.ParquetWriter(whole.name, table.schema, compression="zstd", write_page_checksum=True)
                )
            writer.write_table(table)
            count += len(rows)
        stack.close()
        shutil.copyfileobj(whole, file, 1 << 20)
    return count
