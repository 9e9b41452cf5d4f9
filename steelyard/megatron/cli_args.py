"""The flags of one command, each with its recipe key (`carried`) or the reason why it has none (`left`).

No flag is dropped silently: `left` lists every flag and positional argument that no rule converted, so `carried` and
`left` together are the whole command line. `unsound` has the keys that no recipe can have with these flags.
"""

from __future__ import annotations

import fnmatch
import functools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from steelyard.megatron.flag_table import ALIASES, CARRIED, NOT_CARRIED, NOT_NEEDED, RULED
from steelyard.megatron.shell import symbolic
from steelyard.megatron.shell.lexer import PLACEHOLDER

KINDS = {int: "an integer", float: "a number"}
KNOWN = {*ALIASES, *CARRIED, *RULED, *NOT_CARRIED}


@dataclass(frozen=True)
class DroppedFlag:
    """A flag that is not in the recipe, and the reason; `matters` is false if nothing is lost."""

    flag: str
    value: str
    reason: str
    matters: bool = True


@dataclass
class Given:
    """Flags by name with their values as text, in the order of the command line."""

    where: str
    flags: dict[str, list[str]] = field(default_factory=dict)
    spelled: dict[str, str] = field(default_factory=dict)
    carried: dict[str, str] = field(default_factory=dict)
    left: list[DroppedFlag] = field(default_factory=list)
    unsound: dict[str, tuple[Any, str]] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)

    def add(self, words: list[str]) -> None:
        """Parse the words of a command line."""
        at = 0
        while at < len(words):
            word = words[at]
            at += 1
            if not _is_flag(word):
                self._stray(word)
                continue
            written, equals, value = word.partition("=")
            name = canonical(written)
            values = [value] if equals else []
            while at < len(words) and not _is_flag(words[at]):
                values.append(words[at])
                at += 1
            values = _merged(values)
            most = _most_values(name)
            strays = values[most:] if most is not None else []
            kept = values[: len(values) - len(strays)]
            if name in self.flags:
                reason = "given again later, and the last one counts"
                self._leave(self.spelled[name], self.flags[name], reason, self.flags[name] != kept)
            self.flags[name] = kept
            self.spelled[name] = written
            for stray in strays:
                self._stray(stray)

    def _stray(self, word: str) -> None:
        reason = "not set, so it expands to nothing" if symbolic.is_unset(word) else "belongs to no flag"
        self.left.append(DroppedFlag(symbolic.shown(word), "", reason, not symbolic.is_unset(word)))

    def _leave(self, flag: str, values: list[str], reason: str, matters: bool = True) -> None:
        self.left.append(DroppedFlag(flag, symbolic.shown(" ".join(values)), reason, matters))

    def has(self, name: str) -> bool:
        """Whether a flag is given."""
        return name in self.flags

    def leave(self, name: str, reason: str, matters: bool = True) -> None:
        """Record that a flag is not carried over. No effect if it is not given, or already has a key."""
        if name in self.flags and name not in self.carried:
            self._leave(self.spelled[name], self.flags.pop(name), reason, matters)

    def note(self, what: str, reason: str) -> None:
        """Record something other than a flag that is not carried over."""
        self.left.append(DroppedFlag(what, "", reason))

    def carry(self, name: str, key: str) -> None:
        """Record the key that a flag is part of."""
        if name in self.flags:
            self.carried[name] = key

    def switch(self, name: str, key: str) -> bool:
        """Whether a flag without a value is given."""
        self.carry(name, key)
        return name in self.flags

    def texts(self, name: str, key: str) -> list[str]:
        """All values of a flag; empty if it is not given or its value is unknown."""
        values = self.flags.get(name, [])
        if name in self.flags and (not values or any(symbolic.is_unknown(value) for value in values)):
            self.leave(name, f"{_why_unknown(values)}: set {key}")
            return []
        self.carry(name, key)
        return values

    def text(self, name: str, key: str) -> str | None:
        """The value of a flag."""
        values = self.texts(name, key)
        return values[0] if values else None

    def whole(self, name: str, key: str) -> int | None:
        """The value of a flag as an integer."""
        text = self.text(name, key)
        value = None if text is None else self.number(name, key, text, int)
        return None if value is None else int(value)

    def real(self, name: str, key: str) -> float | None:
        """The value of a flag as a number."""
        text = self.text(name, key)
        return None if text is None else self.number(name, key, text)

    def numbers(self, name: str, key: str, kind: type = float) -> list[float]:
        """All values of a flag as numbers, separated by blanks or commas; empty if one of them is none."""
        words = [word for text in self.texts(name, key) for word in text.replace(",", " ").split()]
        values = [self.number(name, key, word, kind) for word in words]
        return [value for value in values if value is not None] if None not in values else []

    def number(self, name: str, key: str, text: str, kind: type = float) -> float | None:
        """One of a flag's values as a number; the key is unsound if it is none."""
        try:
            value: float = kind(text)
            if math.isfinite(value):
                return value
        except (ValueError, OverflowError):
            pass
        self.reject(key, text, f"{self.spelled[name]} is {text!r:.100}, which is not {KINDS[kind]}")
        return None

    def reject(self, key: str, value: Any, reason: str) -> None:
        """Record that a key cannot have this value; a key may have several reasons."""
        if key in self.unsound:
            reason = f"{self.unsound[key][1]}; {reason}"
        self.unsound[key] = (value, reason)

    def carried_as_written(self) -> dict[str, str]:
        """The keys of the carried flags, by the flag names in the script."""
        return {self.spelled[name]: key for name, key in self.carried.items()}

    def close(self) -> None:
        """Move every flag that no rule converted to `left`, with a reason."""
        for name in [name for name in self.flags if name not in self.carried]:
            reason = _not_needed(name)
            if reason is not None:
                self.leave(name, reason, matters=False)
            else:
                self.leave(
                    name, NOT_CARRIED.get(name, "Steelyard has no such setting, or the converter does not know it")
                )


def _why_unknown(values: list[str]) -> str:
    if not values:
        return "it has no value"
    marks = [mark for value in values for mark in symbolic.MARKED.finditer(value)]
    if any(mark.group(1) == symbolic.COMPUTED for mark in marks):
        return "its value is known only when the script runs"
    names = " ".join(mark.group(2) for mark in marks)
    return f"{names} is not set" + (", pass it after --" if re.fullmatch(r"\$\{?\d\}?", names) else "")


@functools.cache
def canonical(written: str) -> str:
    """Megatron's present name of a flag: old names, and names with underscores, as in some forks."""
    dashed = "--" + written[2:].replace("_", "-") if written.startswith("--") else written
    name = written if written in KNOWN or not (dashed in KNOWN or _not_needed(dashed)) else dashed
    return ALIASES.get(name, name)


def _not_needed(name: str) -> str | None:
    return next(
        (reason for reason, names in NOT_NEEDED.items() if any(fnmatch.fnmatchcase(name, n) for n in names)), None
    )


def _merged(values: list[str]) -> list[str]:
    """Values without the quotes that the shell left in them ("--split '99,1,0'"), and placeholders as unset values."""
    if PLACEHOLDER.search(text := " ".join(values)):
        values = symbolic.fields(PLACEHOLDER.sub(lambda match: symbolic.unset(match.group()), text))
    merged: list[str] = []
    at = 0
    while at < len(values):
        mark = values[at][:1]
        ends = [
            end for end in range(at, len(values)) if values[end].endswith(mark) and (end > at or values[end] != mark)
        ]
        if mark in ("'", '"') and ends:
            merged.append(" ".join(values[at : ends[0] + 1])[1:-1])
            at = ends[0]
        else:
            merged.append(values[at])
        at += 1
    return merged


def _is_flag(word: str) -> bool:
    return (word.startswith("--") and len(word) > 2) or (word[:1] == "-" and word[1:2].isalpha())


def _most_values(name: str) -> int | None:
    """The maximum number of values of a flag; None if unlimited or unknown."""
    if name in CARRIED:
        return 1
    return RULED.get(name)
