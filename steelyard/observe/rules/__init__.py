"""The rules that judge a run: each is a function of its state that returns a `Verdict` or None.

`observe/verdict.py` has the table of all rules, in the order in which they are reported.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "waiting", "warning", "wrong"]
BYTES_SAVED = 14  # in a checkpoint per parameter: weights and the optimizer's state
LEVELS: tuple[Level, ...] = ("ok", "waiting", "warning", "wrong")


@dataclass(frozen=True)
class Verdict:
    """One finding about a run, and what to do about it."""

    kind: str
    level: Level
    message: str
    what_to_do: str


def some(names: list[str], most: int = 4) -> str:
    """The first names, and how many more."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
