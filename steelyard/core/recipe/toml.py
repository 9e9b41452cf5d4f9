"""Reads and writes TOML, with the line number of every key.

The standard parser returns values without positions. A TOML file is a sequence of statements, and each statement is
itself a valid document. So the file is split into statements, and each key gets the first line of its statement.
"""

from __future__ import annotations

import datetime
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from steelyard.core.errors import UserError
from steelyard.core.safe_parse import toml_statements, toml_values


def read(path: str | Path, kind: str) -> tuple[dict[str, Any], dict[str, str]]:
    """The values of a TOML file, and the place of each dotted key; `kind` is for the hint: "a recipe"."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise UserError("this is not a text file", where=str(path), hint=f"{kind} is UTF-8 TOML") from None
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}", where=str(path)) from None
    return parse(text, str(path))


def parse(text: str, file: str) -> tuple[dict[str, Any], dict[str, str]]:
    """The values of a TOML text, and the place (`file:line`) of each dotted key."""
    try:
        values = toml_values(text)
    except tomllib.TOMLDecodeError as error:
        message, line = _line_of(str(error), text)
        raise UserError(f"this is not TOML: {message}", where=f"{file}:{line}", hint=_hint_for(message)) from None
    except ValueError as error:
        raise UserError(f"this cannot be read: {error}", where=file) from None
    return values, {key: f"{file}:{line}" for key, line in _lines(text)}


def parse_value(text: str) -> Any:
    """The value of an override: parsed if it is TOML, otherwise the string itself (`0-2-2-0`, `98,2,0`, a path)."""
    try:
        parsed = toml_values(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    except ValueError as error:
        raise UserError(f"{text:.40}... cannot be read: {error}") from None
    value = parsed.get("value")
    dates = (datetime.date, datetime.time)
    return text if len(parsed) != 1 or isinstance(value, dates) else value


def to_toml(settings: dict[str, Any]) -> str:
    """Format nested dicts as TOML: plain keys first, then the tables."""
    import tomlkit

    document = tomlkit.document()
    for key, value in sorted(settings.items(), key=lambda item: isinstance(item[1], dict)):
        document.add(key, tomlkit.item(value))
    return tomlkit.dumps(document)


def place_of(key: str, places: Mapping[str, str]) -> str | None:
    """The place of a key, or of the innermost table that contains it."""
    while key:
        if key in places:
            return places[key]
        key = key.rpartition(".")[0]
    return None


def name_after(path: str | Path, otherwise: str) -> str:
    """A default name: the name of the file, reduced to characters that are safe in a folder name."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", Path(path).name.removesuffix(".toml")).strip("-.") or otherwise


def leaves(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every dotted key that holds a value rather than a table."""
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _lines(text: str) -> Iterator[tuple[str, int]]:
    table = ""
    entries: dict[str, int] = {}
    for line, statement in toml_statements(text.replace("\r\n", "\n")):
        parsed = _parsed(statement)
        if not parsed:  # An empty line, or a comment.
            continue
        if statement.lstrip().startswith("["):
            table = _innermost(parsed)
            if statement.lstrip().startswith("[["):  # One more entry of a list of tables: nodes.0, nodes.1, ...
                entries[table] = entries.get(table, -1) + 1
                table = f"{table}.{entries[table]}"
            yield table, line
        else:
            for key in _every_key(parsed, f"{table}." if table else ""):
                yield key, line


def _parsed(statement: str) -> dict[str, Any] | None:
    try:
        return tomllib.loads(statement)
    except tomllib.TOMLDecodeError:
        return None


def _innermost(tables: dict[str, Any]) -> str:
    """The dotted name of a header such as `[a.b]`."""
    names = []
    inner: Any = tables
    while isinstance(inner, dict) and inner:
        name, inner = next(iter(inner.items()))
        names.append(name)
    return ".".join(names)


def _every_key(values: dict[str, Any], prefix: str) -> Iterator[str]:
    for key, value in values.items():
        yield prefix + key
        if isinstance(value, dict):
            yield from _every_key(value, f"{prefix}{key}.")


def _line_of(message: str, text: str) -> tuple[str, int]:
    match = re.search(r" \(at line (\d+), column \d+\)$", message)
    if match:
        return message[: match.start()], int(match.group(1))
    return message.removesuffix(" (at end of document)"), max(1, len(text.splitlines()))


def _hint_for(message: str) -> str:
    if message.startswith("Invalid value"):
        return "strings need quotes, numbers do not, and booleans are true and false"
    return "a line is [section], key = value, or # a comment"
