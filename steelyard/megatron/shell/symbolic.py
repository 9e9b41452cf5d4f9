"""Values that a reader cannot know, carried inside ordinary strings until they reach a flag.

What a script would ask a program (`$(nvidia-smi ...)`) or the surrounding shell (`$NHOSTS`) stands in a value between
two private characters, as it was written. An `unset` one acts as empty in tests, as bash would have it; a `computed`
one makes a test undecidable.
"""

from __future__ import annotations

import re

OPEN, CLOSE = "\ue000", "\ue001"
UNSET, COMPUTED = "u", "c"
MARKED = re.compile(f"{OPEN}([{UNSET}{COMPUTED}])([^{CLOSE}]*){CLOSE}")
FIELD = re.compile(f"(?:{OPEN}[^{CLOSE}]*{CLOSE}|[^ \\t\\n\\r])+")


class UndecidedError(Exception):
    """A test or a sum whose outcome depends on what is not known."""


def unset(source: str) -> str:
    """The value of a variable that nobody has set."""
    return f"{OPEN}{UNSET}{shown(source)}{CLOSE}"


def computed(source: str) -> str:
    """The value that a program would have given."""
    return f"{OPEN}{COMPUTED}{shown(source)}{CLOSE}"


def is_unknown(text: str) -> bool:
    """Whether anything in a value is not known."""
    return OPEN in text


def is_unset(text: str) -> bool:
    """Whether a value would vanish in bash: nothing but variables that are not set."""
    return (
        is_unknown(text) and all(mark.group(1) == UNSET for mark in MARKED.finditer(text)) and not MARKED.sub("", text)
    )


def shown(text: str) -> str:
    """A value with its unknown places as the script writes them."""
    return MARKED.sub(lambda mark: mark.group(2), text)


def decided(text: str) -> str:
    """A value for a test: what is unset is empty, what is computed cannot be decided."""
    for mark in MARKED.finditer(text):
        if mark.group(1) == COMPUTED:
            raise UndecidedError(mark.group(2))
    return MARKED.sub("", text)


def fields(text: str) -> list[str]:
    """A value split into words at blanks, never inside something unknown."""
    return FIELD.findall(text)


def without_marks(text: str) -> str:
    """A script's text in which the two private characters do not occur."""
    return text.replace(OPEN, "?").replace(CLOSE, "?")
