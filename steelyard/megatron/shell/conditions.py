"""`[ ... ]` and `[[ ... ]]`: true, false, or undecided if the result depends on unknown values."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from steelyard.megatron.shell import expansion, symbolic
from steelyard.megatron.shell.shell_state import ShellState
from steelyard.megatron.shell.symbolic import UndecidedError
from steelyard.megatron.shell.syntax import Word

# Tests of the machine where the script runs, which is not this one: always undecided.
FILES = {"-f", "-d", "-e", "-r", "-w", "-x", "-s", "-L", "-h", "-b", "-c", "-p", "-S", "-O", "-G", "-t"}
NUMBERS: dict[str, Callable[[int, int], bool]] = {
    "-eq": lambda a, b: a == b,
    "-ne": lambda a, b: a != b,
    "-lt": lambda a, b: a < b,
    "-le": lambda a, b: a <= b,
    "-gt": lambda a, b: a > b,
    "-ge": lambda a, b: a >= b,
}
SAME = ("=", "==", "!=", "=~")
JOINED = {"-a": "&&", "-o": "||"}


def holds(state: ShellState, items: Sequence[Word | str], patterns: bool) -> bool:
    """Whether a test is true; `patterns` is for `[[ ]]`, where the right side may be a pattern."""
    test = _Test(state, list(items), patterns)
    value = test.either()
    if test.items:
        raise UndecidedError("an unsupported test")
    return value


class _Test:
    """Evaluates a test from left to right. Both sides of `&&` are evaluated, and an undecided side may not matter."""

    def __init__(self, state: ShellState, items: list[Word | str], patterns: bool) -> None:
        self.state, self.items, self.patterns = state, items, patterns

    def _peek(self) -> str:
        if not self.items:
            return ""
        item = self.items[0]
        return item if isinstance(item, str) else expansion.text(self.state, item)

    def _next(self) -> Word | str:
        if not self.items:
            raise UndecidedError("a test that ends too soon")
        return self.items.pop(0)

    def _value(self) -> str:
        item = self._next()
        return item if isinstance(item, str) else expansion.text(self.state, item)

    def either(self) -> bool:
        return self._joined("||", self._both, any, True)

    def _both(self) -> bool:
        return self._joined("&&", self._single, all, False)

    def _joined(self, operator: str, part: Callable[[], bool], join: Callable[[list[bool]], bool], ends: bool) -> bool:
        values, undecided = [], None
        while True:
            try:
                values.append(part())
            except UndecidedError as error:
                undecided = error
            if JOINED.get(self._peek(), self._peek()) != operator:
                break
            self._next()
        if undecided is not None and ends not in values:
            raise undecided
        return join(values)

    def _single(self) -> bool:
        first = self._peek()
        if first == "!" and len(self.items) > 1:
            self._next()
            return not self._single()
        if first == "(":
            self._next()
            value = self.either()
            self._next()
            return value
        if first in ("-z", "-n") and self._has_operand():
            self._next()
            return (symbolic.decided(self._value()) == "") == (first == "-z")
        if first == "-v" and self._has_operand():
            self._next()
            return self.state.get(symbolic.decided(self._value())) is not None
        if first in FILES and self._has_operand():
            self._next()
            raise UndecidedError(f"whether {symbolic.shown(self._value())} exists")
        return self._compared()

    def _has_operand(self) -> bool:
        """Whether `-z` is an operator here, and not a compared string or an operator without operand."""
        return len(self.items) > 1 and self.items[1] not in ("&&", "||", ")")

    def _compared(self) -> bool:
        left = self._value()
        operator = self._peek()
        if operator in NUMBERS:
            self._next()
            return NUMBERS[operator](_whole(left), _whole(self._value()))
        if operator in ("<", ">"):
            self._next()
            right = symbolic.decided(self._value())
            return symbolic.decided(left) < right if operator == "<" else symbolic.decided(left) > right
        if operator in SAME:
            self._next()
            return self._alike(symbolic.decided(left), operator)
        return symbolic.decided(left) != ""

    def _alike(self, left: str, operator: str) -> bool:
        item = self._next()
        if operator == "=~":
            try:
                right = item if isinstance(item, str) else expansion.text(self.state, item)
                return re.search(symbolic.decided(right), left) is not None
            except re.error as error:
                raise UndecidedError(str(error)) from None
        if isinstance(item, str) or not self.patterns:
            right = item if isinstance(item, str) else expansion.text(self.state, item)
            return (left == symbolic.decided(right)) == (operator != "!=")
        symbolic.decided(expansion.text(self.state, item))
        return (expansion.pattern(self.state, item).fullmatch(left) is not None) == (operator != "!=")


def _whole(text: str) -> int:
    if symbolic.is_unset(text):
        raise UndecidedError(symbolic.shown(text))
    value = symbolic.decided(text).strip()
    if not re.fullmatch(r"[-+]?\d+", value):
        raise UndecidedError(value or "nothing")
    return int(value)
