"""Text of other programs without what would change a terminal: escape sequences, control and bidi characters."""

from __future__ import annotations

import re

_CONTROL = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)"
    r"|[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


def without_control(text: str, instead: str = "") -> str:
    """The text without escape sequences and control characters, except tabs and newlines."""
    return _CONTROL.sub(instead, text)


def printable(text: str) -> str:
    """The text in one line of printable characters."""
    return "".join(letter if letter.isprintable() else " " for letter in without_control(text, " "))
