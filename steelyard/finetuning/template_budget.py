"""The work limit of rendering a template: a budget in characters, charged before each operation.

Loop iterations and calls have a fixed cost; strings and containers cost the characters they would print. So the budget
bounds both time and memory without a clock: a template that renders on one machine renders on all.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from jinja2.utils import Namespace

BUDGET = 10_000_000  # characters: about a hundred times what a long template needs
PER_INPUT = 100  # additional budget for each character of the conversation
TURN, CALL, PART = 20, 200, 4  # costs of a loop iteration, of a call, and of an element of a container
MOST_BITS = 10_000  # of a product or a power
WIDEST = 999  # padded width
LONGEST_FORMAT = 1 << 20
WIDE_FORMAT = re.compile(r"%(?:\([^)]*\))?[-#0 +]*(?:\*|\d{4,}|\d*\.(?:\*|\d{4,}))")
# Methods and filters that no chat template needs, and that can be slow on short texts.
LEFT_OUT = ("urlize", "striptags", "xmlattr", "pprint", "filesizeformat")
Sized: tuple[type[Any], ...] = (list, tuple, dict, set, frozenset, type({}.keys()), type({}.values()), type({}.items()))
Plain: tuple[type[Any], ...] = (str, bytes, int, float, *Sized)


class TooMuchWork(Exception):
    """A template exceeds its budget."""


class RenderBudget:
    """The remaining budget of one render."""

    def __init__(self, size: int) -> None:
        self.left = BUDGET + PER_INPUT * size
        self._weights: dict[int, tuple[int, Any]] = {}  # With the value, so that its id is not reused.

    def pay(self, price: int) -> None:
        """Subtract a cost; raise if the budget is exhausted."""
        self.left -= price
        if self.left < 0:
            raise TooMuchWork("it loops or recurses too often, or writes too much text")

    def weight(self, value: Any) -> int:
        """The approximate number of characters that a value prints as; an element that occurs twice counts twice."""
        if isinstance(value, (str, bytes)):
            return len(value)
        if isinstance(value, int):
            return 1 + (value.bit_length() >> 2)
        if isinstance(value, Namespace):
            return 2 + sum(2 + self.weight(part) for pair in value._Namespace__attrs.items() for part in pair)
        if not isinstance(value, Sized):
            return 1
        known = self._weights.get(id(value))
        if known is None:
            parts = (part for pair in value.items() for part in pair) if isinstance(value, dict) else value
            known = self._weights[id(value)] = 2 + sum(2 + self.weight(part) for part in parts), value
        return known[0]

    def made(self, value: Any) -> Any:
        """Charge for a new value; an iterator is charged per element."""
        if hasattr(value, "__next__"):
            return self._each(value)
        if isinstance(value, (str, bytes)):
            self.pay(len(value))
        elif isinstance(value, Sized):
            self.pay(PART * len(value))
            if self.weight(value) > self.left:
                self.pay(self.weight(value))
        return value

    def _each(self, values: Iterator[Any]) -> Iterator[Any]:
        for value in values:
            self.pay(TURN)
            yield value


_current: ContextVar[RenderBudget | None] = ContextVar("budget of a template", default=None)


@contextmanager
def limited(size: int) -> Iterator[None]:
    """Limit the work of a render in the block; `size` is the conversation's number of characters."""
    token = _current.set(RenderBudget(size))
    try:
        yield
    finally:
        _current.reset(token)


def budget_of_render() -> RenderBudget:
    """The budget of the current render, or a new one for constant folding at compilation."""
    return _current.get() or RenderBudget(0)


def refuse(is_too_much: bool) -> None:
    """Raise for an operation that is never allowed, whatever the budget."""
    if is_too_much:
        raise TooMuchWork("it computes too large a number or pads a text too wide")


def pay_for_product(budget: RenderBudget, left: Any, right: Any) -> None:
    """Charge for a product of numbers, or for repeating a text or a list."""
    if isinstance(left, int) and isinstance(right, int):
        refuse(left.bit_length() + right.bit_length() > MOST_BITS)
    for whole, times in ((left, right), (right, left)):
        if isinstance(whole, (str, bytes, list, tuple)) and isinstance(times, int):
            budget.pay(budget.weight(whole) * max(0, times))


def pay_for_format(budget: RenderBudget, text: str | bytes, values: Any) -> None:
    """Charge for `text % values`."""
    refuse(len(text) > LONGEST_FORMAT)
    shown = text if isinstance(text, str) else text.decode("latin-1")
    refuse(WIDE_FORMAT.search(shown) is not None)
    # Each field of a mapping may be written many times.
    budget.pay(len(text) + budget.weight(values) * (shown.count("%") if isinstance(values, dict) else 1))


def pay_for_method(
    budget: RenderBudget, owner: Any, name: str, arguments: tuple[Any, ...], named: dict[str, Any]
) -> tuple[Any, ...]:
    """Charge for a method of a text, a number or a container before it is called."""
    given = [*arguments, *named.values()]
    if isinstance(owner, dict) and name in ("get", "items", "keys", "values", "copy"):
        budget.pay(len(owner) if name == "copy" else 1)
        return arguments
    if name == "join" and arguments and not isinstance(owner, dict):
        parts = list(budget.made(iter(arguments[0])))
        budget.pay(sum(map(budget.weight, parts)) + len(owner) * len(parts))
        return (parts, *arguments[1:])
    budget.pay(budget.weight(owner) + sum(map(budget.weight, given)))
    if name == "replace" and len(given) > 1:
        budget.pay(_replaced(owner, given[0], given[1]))
    elif name == "translate" and given and isinstance(given[0], dict):
        budget.pay(len(owner) * max(map(budget.weight, given[0].values()), default=1))
    elif name == "expandtabs":
        budget.pay(owner.count("\t") * max([8, *(each for each in given if isinstance(each, int))]))
    elif name in ("ljust", "rjust", "center", "zfill", "to_bytes"):
        refuse(any(isinstance(each, int) and each > WIDEST for each in given))
    else:
        refuse(name in LEFT_OUT)
    return arguments


def _replaced(text: Any, old: Any, new: Any) -> int:
    """The maximum number of characters that replacing adds."""
    if not all(isinstance(each, (str, bytes)) for each in (text, old, new)):
        return 0
    return (text.count(old) if old else len(text) + 1) * len(new)


def pay_for_growth(budget: RenderBudget, name: str, value: Any, given: list[Any]) -> None:
    """Charge for the characters that a filter adds to its input."""
    texts = [len(each) for each in given if isinstance(each, str)]
    numbers = [each for each in given if isinstance(each, int)]
    if name == "join":
        budget.pay((len(value) if hasattr(value, "__len__") else 1) * max(texts, default=0))
    elif name == "replace" and len(given) > 1:
        budget.pay(_replaced(str(value), str(given[0]), str(given[1])))
    elif name in ("indent", "wordwrap"):
        lines = str(value).count("\n") + 1 if name == "indent" else len(str(value))
        budget.pay(lines * max([1, *texts, *(numbers if name == "indent" else ())]))
    elif name == "tojson":
        budget.pay(budget.weight(value) * sum(numbers))
    elif name == "format":
        pay_for_format(budget, str(value), tuple(given))
        budget.pay(sum(map(budget.weight, given)) * str(value).count("%"))
    elif name == "sum":
        budget.pay(budget.weight(value) * (len(value) if isinstance(value, Sized) else 1))
