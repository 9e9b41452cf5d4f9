"""Bash's arithmetic: integers, the operators of C, and variables."""

from __future__ import annotations

import re
from collections.abc import Callable

from steelyard.megatron.shell.symbolic import UndecidedError

TOKEN = re.compile(
    r"\s*(0[xX][0-9a-fA-F]+|\d[\d_]*|[A-Za-z_]\w*|\*\*|\+\+|--|<<|>>|[<>=!]=|&&|\|\||[-+*/%]=|[-+*/%<>=!?:(),&|^~])"
)
LEVELS = [
    ["||"],
    ["&&"],
    ["|"],
    ["^"],
    ["&"],
    ["==", "!="],
    ["<", "<=", ">", ">="],
    ["<<", ">>"],
    ["+", "-"],
    ["*", "/", "%"],
]
OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "||": lambda a, b: int(bool(a) or bool(b)),
    "&&": lambda a, b: int(bool(a) and bool(b)),
    "|": lambda a, b: a | b,
    "^": lambda a, b: a ^ b,
    "&": lambda a, b: a & b,
    "==": lambda a, b: int(a == b),
    "!=": lambda a, b: int(a != b),
    "<": lambda a, b: int(a < b),
    "<=": lambda a, b: int(a <= b),
    ">": lambda a, b: int(a > b),
    ">=": lambda a, b: int(a >= b),
    "<<": lambda a, b: a << min(b, 64),
    ">>": lambda a, b: a >> min(b, 64),
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: _quotient(a, b),
    "%": lambda a, b: a - b * _quotient(a, b),
    "**": lambda a, b: _power(a, b),
}
LARGEST_POWER = 64
LONGEST_NUMBER = 20  # digits; bash has 64 bits


def evaluate(text: str, get: Callable[[str], str], set_: Callable[[str, str], None]) -> int:
    """The value of an expression; `get` returns the text of a variable and `set_` assigns it."""
    tokens, at = [], 0
    text = text.strip()
    while at < len(text):
        match = TOKEN.match(text, at)
        if match is None:
            raise UndecidedError(text)
        tokens.append(match.group(1))
        at = match.end()
    return _Evaluator(tokens, get, set_, text).whole() if tokens else 0


class _Evaluator:
    """A recursive-descent evaluator of one expression."""

    def __init__(
        self, tokens: list[str], get: Callable[[str], str], set_: Callable[[str, str], None], text: str
    ) -> None:
        self.tokens, self.at, self.get, self.set, self.text = tokens, 0, get, set_, text

    def whole(self) -> int:
        value = self._choice()
        while self._takes(","):
            value = self._choice()
        if self.at < len(self.tokens):
            raise UndecidedError(self.text)
        return value

    def _peek(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def _takes(self, token: str) -> bool:
        matches = self._peek() == token
        self.at += matches
        return matches

    def _choice(self) -> int:
        name, following = self._peek(), self.tokens[self.at + 1 : self.at + 2]
        if name[:1].isidentifier() and following and following[0] in ("=", "+=", "-=", "*=", "/=", "%="):
            self.at += 2
            value = self._choice()
            value = value if following[0] == "=" else OPERATIONS[following[0][0]](self._variable(name), value)
            self.set(name, str(value))
            return value
        condition = self._level(0)
        if not self._takes("?"):
            return condition
        first = self._choice()
        if not self._takes(":"):
            raise UndecidedError(self.text)
        second = self._choice()
        return first if condition else second

    def _level(self, level: int) -> int:
        if level == len(LEVELS):
            return self._power()
        value = self._level(level + 1)
        while self._peek() in LEVELS[level]:
            operator = self._peek()
            self.at += 1
            value = _wrapped(OPERATIONS[operator](value, self._level(level + 1)))
        return value

    def _power(self) -> int:
        value = self._single()
        return OPERATIONS["**"](value, self._power()) if self._takes("**") else value

    def _single(self) -> int:
        token = self._peek()
        self.at += 1
        if token == "(":
            value = self._choice()
            if not self._takes(")"):
                raise UndecidedError(self.text)
            return value
        if token in ("-", "+", "!", "~"):
            value = self._single()
            return {"-": -value, "+": value, "!": int(not value), "~": ~value}[token]
        if token in ("++", "--"):
            name = self._peek()
            self.at += 1
            return self._changed(name, 1 if token == "++" else -1)
        if token[:1].isdigit():
            if len(token) > LONGEST_NUMBER:
                raise UndecidedError(f"a number of {len(token)} digits")
            return int(token, 16) if token[:2].lower() == "0x" else int(token.replace("_", ""))
        if token[:1].isidentifier():
            value = self._variable(token)
            if self._peek() in ("++", "--"):
                self._changed(token, 1 if self._peek() == "++" else -1)
                self.at += 1
            return value
        raise UndecidedError(self.text)

    def _changed(self, name: str, by: int) -> int:
        value = self._variable(name) + by
        self.set(name, str(value))
        return value

    def _variable(self, name: str) -> int:
        text = self.get(name).strip().replace("_", "")  # 5_000_000, as Python reads it.
        if not re.fullmatch(rf"-?\d{{1,{LONGEST_NUMBER}}}", text):
            raise UndecidedError(name)
        return int(text)


def _wrapped(value: int) -> int:
    """Wrap around to 64 bits, as bash does."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


def _quotient(a: int, b: int) -> int:
    """Division that rounds towards zero, as in C."""
    if b == 0:
        raise UndecidedError("a division by zero")
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def _power(a: int, b: int) -> int:
    if not 0 <= b <= LARGEST_POWER:
        raise UndecidedError(f"a power of {b}")
    return _wrapped(a**b)
