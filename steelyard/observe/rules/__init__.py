"""The rules that judge a run: each is a function of its state that gives a `Verdict`, or none.

`observe/verdict.py` holds the table of all of them, in the order in which they are told.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "waiting", "warning", "wrong"]
LEVELS: tuple[Level, ...] = ("ok", "waiting", "warning", "wrong")


@dataclass(frozen=True)
class Verdict:
    """One thing to know about a run, and what to do about it."""

    kind: str
    level: Level
    message: str
    what_to_do: str
