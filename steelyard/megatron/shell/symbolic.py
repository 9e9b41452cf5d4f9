"""Unknown values, represented inside ordinary strings until they reach a flag.

The output of a program (`$(nvidia-smi ...)`) or a variable of the calling shell (`$NHOSTS`) is stored as its source
text between two private-use characters. An `unset` value is empty in tests, as in bash; a `computed` value makes a test
undecided.
"""

from __future__ import annotations

import re

OPEN, CLOSE = "\ue000", "\ue001"
UNSET, COMPUTED = "u", "c"
MARKED = re.compile(f"{OPEN}([{UNSET}{COMPUTED}])([^{CLOSE}]*){CLOSE}")
FIELD = re.compile(f"(?:{OPEN}[^{CLOSE}]*{CLOSE}|[^ \\t\\n\\r])+")


class UndecidedError(Exception):
    """A test or an expression whose result depends on unknown values."""


def unset(source: str) -> str:
    """The value of a variable that is not set."""
    return f"{OPEN}{UNSET}{shown(source)}{CLOSE}"


def computed(source: str) -> str:
    """The value that only a program could return."""
    return f"{OPEN}{COMPUTED}{shown(source)}{CLOSE}"


def is_unknown(text: str) -> bool:
    """Whether any part of a value is unknown."""
    return OPEN in text


def is_unset(text: str) -> bool:
    """Whether a value is empty in bash: it consists only of variables that are not set."""
    return (
        is_unknown(text) and all(mark.group(1) == UNSET for mark in MARKED.finditer(text)) and not MARKED.sub("", text)
    )


def shown(text: str) -> str:
    """A value with its unknown parts replaced by their source text."""
    return MARKED.sub(lambda mark: mark.group(2), text)


def decided(text: str) -> str:
    """A value for a test: unset parts are empty, computed parts raise `UndecidedError`."""
    for mark in MARKED.finditer(text):
        if mark.group(1) == COMPUTED:
            raise UndecidedError(mark.group(2))
    return MARKED.sub("", text)


def fields(text: str) -> list[str]:
    """A value split at blanks, but not inside unknown parts."""
    return FIELD.findall(text)


def without_marks(text: str) -> str:
    """The text of a script without the two private-use characters."""
    return text.replace(OPEN, "?").replace(CLOSE, "?")
