"""A Jinja sandbox for untrusted templates, in which all work is charged to a budget (template_budget.py).

Jinja's own sandbox blocks access to Python, but not endless loops and unlimited output. The result of a template is
unchanged. The environment intercepts operators, calls, filters, tests and output. It cannot intercept loops,
comparisons, literals, slices and `~`, so the syntax tree is changed: these are wrapped in filters that only charge.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import wraps
from types import BuiltinMethodType, MethodType
from typing import Any

from jinja2 import Environment, nodes
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.utils import pass_context
from jinja2.visitor import NodeTransformer

from steelyard.finetuning.template_budget import (
    CALL,
    LEFT_OUT,
    MOST_BITS,
    TURN,
    WIDEST,
    Plain,
    TooMuchWork,
    budget_of_render,
    pay_for_format,
    pay_for_growth,
    pay_for_method,
    pay_for_product,
    refuse,
)

LONGEST_SOURCE = 1 << 20
# Filters that do not read the elements of a container.
SHALLOW = (
    "length", "count", "first", "last", "default", "d", "select", "reject", "selectattr", "rejectattr", "map", "items",
    "list", "reverse", "batch", "slice", "attr", "random", "safe",
)  # fmt: skip
COMPARING = (
    "in", "eq", "equalto", "==", "ne", "!=", "lt", "lessthan", "<", "le", "<=", "gt", "greaterthan", ">", "ge", ">=",
    "upper", "lower",
)  # fmt: skip
PLAIN_TEXT = ("trim", "upper", "lower", "capitalize", "title", "string", "safe", "length", "count")
SORTING = ("sort", "dictsort", "unique", "groupby", "min", "max")
SIZED = ("center", "indent", "batch", "slice", "round", "tojson")


@pass_context  # So that it is not constant-folded.
def _turn(context: Context, price: int) -> None:
    budget_of_render().pay(price)


def _used(value: Any) -> Any:
    """Charge for reading a whole value."""
    budget = budget_of_render()
    budget.left -= len(value) if type(value) is str else budget.weight(value)
    if budget.left < 0:
        budget.pay(0)
    return value


def _iterated(value: Any) -> Any:
    """Charge for iterating over a value once."""
    budget = budget_of_render()
    if hasattr(value, "__next__"):
        return budget.made(value)
    budget.pay(len(value) if hasattr(value, "__len__") else 1)
    return value


def _made(value: Any) -> Any:
    return budget_of_render().made(value)


PRICES: dict[str, Callable[..., Any]] = {
    "_turn": _turn, "_used": _used, "_iterated": _iterated, "_made": _made,
}  # fmt: skip


class _Priced(NodeTransformer):
    """Inserts charges into a syntax tree."""

    def visit_For(self, node: nodes.For) -> Any:
        self.generic_visit(node)
        node.iter = _around(node.iter, "_iterated")
        node.body.insert(0, _statement(TURN))
        return node

    def visit_Macro(self, node: nodes.Macro) -> Any:
        self.generic_visit(node)
        node.body.insert(0, _statement(CALL))
        return node

    visit_CallBlock = visit_Block = visit_Macro

    def visit_Compare(self, node: nodes.Compare) -> Any:
        self.generic_visit(node)
        node.expr = _around(node.expr, "_used")
        for operand in node.ops:
            operand.expr = _around(operand.expr, "_used")
        return node

    def visit_Concat(self, node: nodes.Concat) -> Any:
        self.generic_visit(node)
        node.nodes = [_around(each, "_used") for each in node.nodes]
        return node

    def visit_List(self, node: nodes.List | nodes.Dict) -> Any:
        self.generic_visit(node)
        return _around(node, "_made")

    visit_Dict = visit_List

    def visit_Tuple(self, node: nodes.Tuple) -> Any:
        self.generic_visit(node)
        return _around(node, "_made") if node.ctx == "load" else node

    def visit_Getitem(self, node: nodes.Getitem) -> Any:
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            return _around(node, "_made")
        node.arg = _around(node.arg, "_used")
        return node


def _around(node: Any, name: str) -> Any:
    if isinstance(node, nodes.Const):
        return node
    return nodes.Filter(node, name, [], [], None, None).set_lineno(node.lineno)


def _statement(price: int) -> nodes.Node:
    return nodes.ExprStmt(nodes.Filter(nodes.Const(price), "_turn", [], [], None, None), lineno=1)


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's immutable sandbox with a budget."""

    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "**", "%"))

    def __init__(self, **options: Any) -> None:
        super().__init__(finalize=_used, **options)
        self.globals.pop("lipsum")
        for name in LEFT_OUT:
            del self.filters[name]
        for name, function in list(self.filters.items()):
            self.add_filter(name, function)
        self.filters.update(PRICES)
        self.tests.update({name: _comparing(self.tests[name]) for name in COMPARING})
        self.concat = self._joined  # type: ignore[method-assign]

    def add_filter(self, name: str, function: Callable[..., Any]) -> None:
        """Add a filter that charges the budget."""
        self.filters[name] = _filter(name, function)

    def compiled(self, source: str) -> Callable[..., str]:
        """Compile a template to a function of its variables."""
        if len(source) > LONGEST_SOURCE:
            raise TooMuchWork(f"it is longer than {LONGEST_SOURCE >> 20} MiB")
        tree = _Priced().visit(self.parse(source))
        return self.from_string(tree.set_environment(self)).render

    @staticmethod
    def _joined(parts: Iterable[str]) -> str:
        budget, texts = budget_of_render(), []
        for part in parts:
            texts.append(part)
            budget.left -= len(part)
            if budget.left < 0:
                budget.pay(0)
        return "".join(texts)

    def call(self, context: Context, function: Any, /, *arguments: Any, **named: Any) -> Any:
        """Call a function from a template."""
        budget = budget_of_render()
        budget.pay(CALL)
        if isinstance(function, (BuiltinMethodType, MethodType)) and isinstance(function.__self__, Plain):
            arguments = pay_for_method(budget, function.__self__, function.__name__, arguments, named)
        return budget.made(super().call(context, function, *arguments, **named))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Apply a binary operator."""
        budget = budget_of_render()
        if operator == "*":
            pay_for_product(budget, left, right)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            refuse(left.bit_length() * abs(right) > MOST_BITS)
        elif operator == "%" and isinstance(left, (str, bytes)):
            pay_for_format(budget, left, right)
        elif operator == "+":
            sizes = (
                len(each) if isinstance(each, (str, list, tuple)) else budget.weight(each) for each in (left, right)
            )
            budget.pay(sum(sizes))
        else:
            budget.pay(budget.weight(left) + budget.weight(right))
        return budget.made(super().call_binop(context, operator, left, right))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """`str.format` as a function that charges for each field."""
        if super().wrap_str_format(value) is None:
            return None
        text, is_map = value.__self__, value.__name__ == "format_map"

        def formatted(*arguments: Any, **named: Any) -> str:
            given = arguments[0] if is_map else named
            kind: type[str] = type(text)
            return kind(_Formatter(self).vformat(text, () if is_map else arguments, given))

        return formatted


class _Formatter(SandboxedFormatter):
    def format_field(self, value: Any, format_spec: str) -> Any:
        refuse(re.search(r"\d{4,}", format_spec) is not None)
        _used(value)
        return super().format_field(value, format_spec)


def _filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that charges for its inputs and its output."""
    first = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)
    def priced(*arguments: Any, **named: Any) -> Any:
        budget, value = budget_of_render(), arguments[first]
        if type(value) is str and len(arguments) == first + 1 and not named and name in PLAIN_TEXT:
            budget.pay(2 * len(value))
            return function(*arguments)
        given = [*arguments[first + 1 :], *named.values()]
        if hasattr(value, "__next__") and name == "join":
            value = list(budget.made(value))
            arguments = (*arguments[:first], value, *arguments[first + 1 :])
        if name in SIZED:
            refuse(any(isinstance(each, int) and abs(each) > WIDEST for each in given))
        if name in SHALLOW:
            budget.pay(len(value) if hasattr(value, "__len__") else 1)
        else:
            price = budget.weight(value) + sum(map(budget.weight, given))
            budget.pay(price * 20 if name in SORTING else price)
            pay_for_growth(budget, name, value, given)
        return budget.made(function(*arguments, **named))

    return priced


def _comparing(function: Any) -> Callable[..., Any]:
    @wraps(function)
    def priced(*arguments: Any, **named: Any) -> Any:
        for value in arguments:
            if not isinstance(value, Environment):
                _used(value)
        return function(*arguments, **named)

    return priced
