"""Constraints: expressions over the names of a space, evaluated from their syntax tree and never with `eval`.

`parallel.tensor * parallel.pipeline <= world and train.micro_batch in (1, 2, 4)`: numbers, strings, names of the
space, arithmetic, comparisons, and, or, not, in, min and max. Everything else is rejected when the file is read.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Collection, Mapping
from typing import Any

ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda one, many: one in many,
    ast.NotIn: lambda one, many: one not in many,
}
FUNCTIONS: dict[str, Callable[..., Any]] = {"min": min, "max": max, "abs": abs}


class ExpressionError(ValueError):
    """An invalid expression, with the reason."""


class Expression:
    """One constraint, checked against the names it may use."""

    def __init__(self, text: str, names: Collection[str]) -> None:
        self.text = text
        try:
            self._tree = ast.parse(text.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            raise ExpressionError("not a valid expression") from None
        self.names: set[str] = set()
        self._check(self._tree, names)

    def holds(self, values: Mapping[str, Any]) -> bool:
        """Whether it is true for a point. Errors (a division by zero, a string plus a number) count as false."""
        try:
            return bool(_value(self._tree, values))
        except (ArithmeticError, TypeError):
            return False

    def _check(self, node: ast.expr, names: Collection[str]) -> None:
        """Reject unsupported syntax here, rather than in the middle of a search."""
        name = _dotted(node)
        if name is not None:
            if name not in names:
                raise ExpressionError(f"{name} is not in the space: {', '.join(sorted(names))}")
            self.names.add(name)
            return
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float | str):
            return
        for inner in _parts(node):
            self._check(inner, names)


def _parts(node: ast.expr) -> list[ast.expr]:
    """The subexpressions of a node; raises for unsupported nodes."""
    match node:
        case ast.BoolOp(values=values):
            return values
        case ast.BinOp(left=left, right=right, op=sign) if type(sign) in ARITHMETIC:
            return [left, right]
        case ast.UnaryOp(operand=operand, op=ast.Not() | ast.USub() | ast.UAdd()):
            return [operand]
        case ast.Compare(left=left, comparators=others, ops=signs) if all(type(sign) in COMPARISONS for sign in signs):
            return [left, *others]
        case ast.IfExp(test=test, body=body, orelse=otherwise):
            return [test, body, otherwise]
        case ast.Tuple(elts=elements) | ast.List(elts=elements):
            return elements
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in FUNCTIONS and arguments:
            return arguments
    raise ExpressionError(
        f"{ast.unparse(node)} is not allowed; use names of the space, numbers, strings, arithmetic and comparisons"
    )


def _dotted(node: ast.expr) -> str | None:
    """`parallel.tensor` as one name."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        before = _dotted(node.value)
        return None if before is None else f"{before}.{node.attr}"
    return None


def _value(node: ast.expr, values: Mapping[str, Any]) -> Any:
    name = _dotted(node)
    if name is not None:
        return values[name]
    match node:
        case ast.Constant(value=value):
            return value
        case ast.BoolOp(op=ast.And(), values=parts):
            return all(_value(part, values) for part in parts)
        case ast.BoolOp(values=parts):
            return any(_value(part, values) for part in parts)
        case ast.BinOp(left=left, op=sign, right=right):
            return ARITHMETIC[type(sign)](_number(left, values), _number(right, values))
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return not _value(operand, values)
        case ast.UnaryOp(op=sign, operand=operand):
            number = _number(operand, values)
            return -number if isinstance(sign, ast.USub) else number
        case ast.Compare():
            return _compared(node, values)
        case ast.IfExp(test=test, body=body, orelse=otherwise):
            return _value(body if _value(test, values) else otherwise, values)
        case ast.Tuple(elts=elements) | ast.List(elts=elements):
            return [_value(element, values) for element in elements]
        case ast.Call(func=ast.Name(id=function), args=arguments):
            return FUNCTIONS[function](*(_value(argument, values) for argument in arguments))
    raise AssertionError("unsupported nodes are rejected by _check")


def _compared(node: ast.Compare, values: Mapping[str, Any]) -> bool:
    left = _value(node.left, values)
    for sign, other in zip(node.ops, node.comparators, strict=True):
        right = _value(other, values)
        if not COMPARISONS[type(sign)](left, right):
            return False
        left = right
    return True


def _number(node: ast.expr, values: Mapping[str, Any]) -> int | float:
    """A numeric operand. Strings are rejected, since a string times a number is a long string."""
    value = _value(node, values)
    if not isinstance(value, int | float):
        raise TypeError
    return value
