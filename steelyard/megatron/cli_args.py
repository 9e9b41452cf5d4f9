"""The flags of one command, each with its recipe key (`carried`) or the reason why it has none (`left`).

No flag is dropped silently: `left` lists every flag and positional argument that no rule converted, so `carried` and
`left` together are the whole command line.
"""

from __future__ import annotations

import fnmatch
import math
import re
from dataclasses import dataclass, field

from steelyard.core.errors import UserError
from steelyard.megatron.flag_table import ALIASES, CARRIED, NOT_CARRIED, NOT_NEEDED, RULED
from steelyard.megatron.shell import symbolic

KINDS = {int: "an integer", float: "a number"}


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
            name = ALIASES.get(written, written)
            values = [value] if equals else []
            while at < len(words) and not _is_flag(words[at]):
                values.append(words[at])
                at += 1
            most = _most_values(name)
            strays = values[most:] if most is not None else []
            if name in self.flags:
                self._leave(self.spelled[name], self.flags[name], "given again later, and the last one counts")
            self.flags[name] = values[: len(values) - len(strays)]
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
        return None if text is None else int(self.number(name, text, int))

    def real(self, name: str, key: str) -> float | None:
        """The value of a flag as a number."""
        text = self.text(name, key)
        return None if text is None else self.number(name, text)

    def number(self, name: str, text: str, kind: type = float) -> float:
        """One of a flag's values as a number."""
        try:
            value: float = kind(text)
            if not math.isfinite(value):
                raise ValueError(text)
        except (ValueError, OverflowError):
            message = f"{self.spelled[name]} is {text!r:.100}, which is not {KINDS[kind]}"
            raise UserError(message, where=self.where, hint="pass the arguments of the script: -- ARGS") from None
        return value

    def carried_as_written(self) -> dict[str, str]:
        """The keys of the carried flags, by the flag names in the script."""
        return {self.spelled[name]: key for name, key in self.carried.items()}

    def close(self) -> None:
        """Move every flag that no rule converted to `left`, with a reason."""
        for name in [name for name in self.flags if name not in self.carried]:
            reason = next(
                (reason for reason, names in NOT_NEEDED.items() if any(fnmatch.fnmatchcase(name, n) for n in names)),
                None,
            )
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


def _is_flag(word: str) -> bool:
    return (word.startswith("--") and len(word) > 2) or (word[:1] == "-" and word[1:2].isalpha())


def _most_values(name: str) -> int | None:
    """The maximum number of values of a flag; None if unlimited or unknown."""
    if name in CARRIED:
        return 1
    return RULED.get(name)
