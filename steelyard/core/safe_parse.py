"""Parsers for untrusted JSON and TOML, with limits.

Untrusted text may be endless, nested thousands of levels deep, or hold numbers of a hundred thousand digits. Python's
parsers then raise RecursionError or conversion errors, or run for minutes. Here all of these raise a `ValueError` with
one short sentence; reading a file raises a `UserError` that names the file.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from steelyard.core.errors import CorruptFileError, UserError

MOST_DEPTH = 64
MOST_JSON_BYTES = 256 << 20  # The largest known index of a model's weights has 20 MB.
MOST_TOML_BYTES = 1 << 20
LARGEST_IN_JSON = 10**100  # Fits a float. Tokenizers have 10**30 for no limit, so 64 bits are too few.
LARGEST_IN_TOML = 2**63 - 1
TOO_DEEP = "it is nested too deeply"
TOO_LONG = "it holds a number of more than 4300 digits"
# Strings and comments, which are skipped; brackets; and the separators of keys.
TOML_TOKEN = re.compile(
    r'"""(?:\\.|[^\\])*?""""{0,2}|\'\'\'.*?\'\'\'\'{0,2}|"(?:\\.|[^"\\\n])*"|\'[^\'\n]*\'|#[^\n]*|[\[\]{}=,.\n]',
    re.DOTALL,
)


def loads(text: str | bytes) -> Any:
    """A JSON value, checked for syntax only: for files with thousands of records."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    except json.JSONDecodeError:
        raise
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8") from None
    except ValueError:
        raise ValueError(TOO_LONG) from None


def json_objects(lines: Iterable[str] | Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """The JSON objects among lines, without those that a killed writer left incomplete."""
    for line in lines:
        with suppress(ValueError):
            if isinstance(value := loads(line), dict):
                yield value


def json_value(text: str | bytes) -> Any:
    """A JSON value whose depth and numbers are within limits."""
    value = loads(text)
    _check(value, LARGEST_IN_JSON)
    return value


def read_json(path: str | Path) -> Any:
    """The JSON value in a file."""
    try:
        with open(path, "rb") as file:
            text = file.read(MOST_JSON_BYTES + 1)
        if len(text) > MOST_JSON_BYTES:
            raise ValueError(f"it is larger than {MOST_JSON_BYTES >> 20} MiB")
        return json_value(text)
    except OSError as error:
        raise CorruptFileError(f"cannot be read: {error.strerror}", where=str(path)) from None
    except ValueError as error:
        raise CorruptFileError(f"this is not valid JSON: {error}", where=str(path)) from None


def read_json_object(path: str | Path) -> dict[str, Any]:
    """The JSON object in a file."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise UserError("this is not a JSON object", where=str(path))
    return value


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if the file is missing or invalid, for example half written."""
    try:
        value = loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def toml_values(text: str) -> dict[str, Any]:
    """The values of a TOML text. Raises `tomllib.TOMLDecodeError` for invalid TOML, `ValueError` beyond a limit."""
    if len(text) > MOST_TOML_BYTES:
        raise ValueError(f"it is larger than {MOST_TOML_BYTES >> 20} MiB")
    for _ in toml_statements(text):  # Checks the limits first: the parser is very slow for keys of many parts.
        pass
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        raise
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    except ValueError:
        raise ValueError(TOO_LONG) from None
    _check(values, LARGEST_IN_TOML)
    return values


def toml_statements(text: str) -> Iterator[tuple[int, str]]:
    """Yield the statements of a TOML text, each with the number of its first line. They may span several lines."""
    depth = dots = start = 0
    line, in_key = 1, True
    for token in TOML_TOKEN.finditer(text):
        sign = token[0]
        depth += (sign in "[{") - (sign in "]}")
        if sign == ".":
            dots += in_key
        elif len(sign) == 1:
            dots, in_key = 0, sign != "="
        if depth > MOST_DEPTH or dots > MOST_DEPTH:
            raise ValueError(TOO_DEEP)
        if sign == "\n" and depth <= 0:
            statement = text[start : token.start()]
            yield line, statement
            line += statement.count("\n") + 1
            start, depth = token.end(), 0
    yield line, text[start:]


def _check(value: Any, largest: int) -> None:
    """Raise for a value that is nested too deeply, and for numbers and strings that later code cannot represent."""
    level: list[tuple[str, Any]] = [("", value)]
    for _ in range(3 * MOST_DEPTH):  # A header, a key below it, and a value below that.
        below: list[tuple[str, Any]] = []
        for key, each in level:
            if isinstance(each, dict):
                below += [(f"{key}.{name}" if key else str(name), inner) for name, inner in each.items()]
            elif isinstance(each, list):
                below += [(key, inner) for inner in each]
            elif isinstance(each, int) and abs(each) > largest:
                raise ValueError(f"{key or 'the number'} has {each.bit_length()} bits, more than the limit")
            elif isinstance(each, str) and "\0" in each:
                raise ValueError(f"{key or 'the string'} contains a NUL character")
        if not below:
            return
        level = below
    raise ValueError(TOO_DEEP)
