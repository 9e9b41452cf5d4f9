"""Documents from files: plain text holds one per line, jsonl one per object."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from steelyard.core.errors import UserError


def documents(paths: Iterable[Path], key: str = "text") -> Iterator[str]:
    """Every document of the files, in order. A line that cannot be read is refused by file and number."""
    for path in paths:
        if not path.is_file():
            raise UserError(f"there is no file {path}")
        with open(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                where = f"{path}:{number}"
                text = _decoded(line.rstrip(b"\r\n"), where)
                yield _from_json(text, key, where) if path.suffix == ".jsonl" else text


def _decoded(line: bytes, where: str) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"byte {error.start} of the line is not UTF-8", where=where) from None


def _from_json(line: str, key: str, where: str) -> str:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise UserError(f"this is not JSON: {error}", where=where) from None
    if not isinstance(value, dict) or not isinstance(value.get(key), str):
        raise UserError(f"there is no text under the key {key!r}", where=where, mend="name another with --json-keys")
    return str(value[key])
