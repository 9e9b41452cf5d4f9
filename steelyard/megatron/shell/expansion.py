"""Expansion of words: variables, defaults, prefix and suffix removal, arithmetic, and a few command substitutions."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable
from pathlib import PurePosixPath

from steelyard.megatron.shell import arithmetic, parser, symbolic, syntax
from steelyard.megatron.shell.shell_state import ShellState
from steelyard.megatron.shell.symbolic import UndecidedError
from steelyard.megatron.shell.syntax import Arithmetic, Parameter, Substitution, Text, Word

WHOLE = ("@", "*")
DEEPEST = 40


def words(state: ShellState, all_words: list[Word]) -> list[str]:
    """The fields of several words, for a command or an array."""
    return [text for word in all_words for text in fields(state, word)]


def fields(state: ShellState, word: Word) -> list[str]:
    """The fields of one word: unquoted expansions are split at blanks, and `"${A[@]}"` is one field per entry."""
    done: list[str] = []
    current: str | None = None
    for number, part in enumerate(word):
        if isinstance(part, Text):
            current = (current or "") + (_home(state, part) if number == 0 else part.value)
            continue
        values = _values(state, part)
        if isinstance(values, list):
            pieces = values if part.quoted else [piece for value in values for piece in symbolic.fields(value)]
        elif part.quoted:
            pieces = [values]
        else:
            pieces = symbolic.fields(values)
            if values[:1].isspace() and current is not None:
                done.append(current)
                current = None
        if not pieces:
            continue
        done += [(current or "") + pieces[0], *pieces[1:]]
        current = done.pop()
        if isinstance(values, str) and not part.quoted and values[-1:].isspace():
            done.append(current)
            current = None
    return done if current is None else [*done, current]


def text(state: ShellState, word: Word) -> str:
    """One word as one string, for an assignment."""
    return "".join(
        _home(state, part) if isinstance(part, Text) and number == 0 else _one(state, part)
        for number, part in enumerate(word)
    )


def pattern(state: ShellState, word: Word) -> re.Pattern[str]:
    """A word as a pattern; quoted parts match literally."""
    pieces = []
    for part in word:
        value = _one(state, part)
        if part.quoted:
            pieces.append(re.escape(value))
        else:
            pieces.append(fnmatch.translate(value).removeprefix("(?s:").removesuffix(")\\Z").removesuffix(")\\z"))
    return re.compile("".join(pieces), re.DOTALL)


def number(state: ShellState, expression: Word) -> int:
    """The value of `(( expression ))`."""

    def get(name: str) -> str:
        return text(state, (Parameter(name, f"${name}"),))

    written = text(state, expression)
    if symbolic.is_unknown(written):
        raise UndecidedError(symbolic.shown(written))
    return arithmetic.evaluate(written, get, state.set)


def _home(state: ShellState, part: Text) -> str:
    home = state.get("HOME")
    if part.quoted or not isinstance(home, str) or not re.match(r"~(/|$)", part.value):
        return part.value
    return home + part.value[1:]


def _one(state: ShellState, part: syntax.Part) -> str:
    if isinstance(part, Text):
        return part.value
    value = _values(state, part)
    return value if isinstance(value, str) else " ".join(value)


def _values(state: ShellState, part: Parameter | Arithmetic | Substitution) -> str | list[str]:
    state.depth += 1
    if state.depth > DEEPEST:
        raise state.refuse("expansions are nested too deeply")
    try:
        if isinstance(part, Arithmetic):
            return str(number(state, part.expression))
        if isinstance(part, Substitution):
            return _substitution(state, part)
        return _parameter(state, part)
    except UndecidedError:
        return symbolic.computed(part.source)
    finally:
        state.depth -= 1


def _parameter(state: ShellState, part: Parameter) -> str | list[str]:
    value = _lookup(state, part)
    if part.length:
        if isinstance(value, list):
            return str(len(value))
        return str(len(symbolic.decided(value or "")))
    if part.operator == "!":
        name = value if isinstance(value, str) else ""
        target = state.get(name)
        return target if isinstance(target, str) else symbolic.computed(part.source)
    if part.operator:
        return _apply_operator(state, part, value)
    return symbolic.unset(part.source) if value is None else value


def _lookup(state: ShellState, part: Parameter) -> str | list[str] | None:
    if part.name in ("@", "*"):
        return list(state.arguments)
    if part.name == "#":
        return str(len(state.arguments))
    if part.name.isdigit():
        return state.argument(int(part.name))
    if part.name in "?$!-":
        return "0" if part.name == "?" else symbolic.computed(part.source)
    if part.name == "BASH_SOURCE":
        return state.file
    value = "." if part.name == "PWD" and "PWD" not in state.variables else state.get(part.name)  # As `pwd`.
    if part.index is None:
        return (value[0] if value else None) if isinstance(value, list) else value
    index = text(state, part.index)
    if value is None:
        return None
    entries = value if isinstance(value, list) else [value]
    if index in WHOLE:
        return entries
    at = number(state, part.index)
    return entries[at] if -len(entries) <= at < len(entries) else None


def _apply_operator(state: ShellState, part: Parameter, value: str | list[str] | None) -> str | list[str]:
    kind = part.operator.removeprefix(":") if part.operator in (":-", ":=", ":+", ":?") else part.operator
    if kind in ("-", "=", "+", "?"):
        empty = value is None or (isinstance(value, str) and symbolic.is_unset(value))
        if part.operator.startswith(":"):
            empty = empty or not value
        if kind == "+":
            return "" if empty else text(state, part.argument)
        if not empty:
            return value or ""
        if kind == "?":
            return symbolic.unset(part.source)
        default = text(state, part.argument)
        if kind == "=":
            state.set(part.name, default)
        return default
    if isinstance(value, list) and kind == ":":
        start, _, length = symbolic.decided(text(state, part.argument)).partition(":")
        first = max(0, number(state, (Text(start, True),)) - (part.name in WHOLE))
        return value[first:][: number(state, (Text(length, True),)) if length else None]
    if isinstance(value, list):
        return [_cut(state, part, entry) for entry in value]
    return symbolic.unset(part.source) if value is None else _cut(state, part, value)


def _cut(state: ShellState, part: Parameter, value: str) -> str:
    """`#`, `##`, `%`, `%%`, `/`, `//`, `^`, `,` and `:` on one value."""
    kind = part.operator
    if kind in ("^", "^^", ",", ",,"):
        change = str.upper if kind[0] == "^" else str.lower
        return change(value) if len(kind) == 2 else change(value[:1]) + value[1:]
    if kind == ":":
        start, _, length = symbolic.decided(text(state, part.argument)).partition(":")
        first = number(state, (Text(start, True),))
        return value[first:][: number(state, (Text(length, True),)) if length else None]
    if kind in ("/", "//"):
        old, _, new = symbolic.decided(text(state, part.argument)).partition("/")
        return value.replace(old, new, 1 if kind == "/" else -1) if old else value
    shape = pattern(state, part.argument)
    ends = range(len(value) + 1)
    if kind in ("#", "##"):
        cuts = [end for end in (ends if kind == "#" else reversed(ends)) if shape.fullmatch(value[:end])]
        return value[cuts[0] :] if cuts else value
    cuts = [start for start in (reversed(ends) if kind == "%" else ends) if shape.fullmatch(value[start:])]
    return value[: cuts[0]] if cuts else value


def _substitution(state: ShellState, part: Substitution) -> str:
    """The output of a command, if it can be computed without running the command."""
    body = parser.parse(part.script, state.file, part.line)
    while len(body) == 1 and isinstance(body[0], syntax.Chain) and body[0].operator == "&&":
        body = [body[0].left, body[0].right]  # cd "$(dirname "$0")" && pwd
    if not body:
        return ""
    if len(body) == 1 and isinstance(body[0], syntax.Pipe):
        return _piped(state, body[0], part)
    *before, last = body
    if not isinstance(last, syntax.Simple) or last.assignments or not last.words:
        raise UndecidedError(part.source)
    name, *arguments = words(state, last.words)
    if name == "cat" and last.document is not None and not arguments and not before:
        return text(state, last.document).rstrip("\n")
    if name == "pwd" and all(isinstance(step, syntax.Simple) for step in before):
        return _folder_after(state, before)
    if name in SUBSTITUTIONS and not before and last.document is None:
        return SUBSTITUTIONS[name](
            state, [argument for argument in arguments if argument not in ("-f", "-m", "-n", "-e")]
        )
    raise UndecidedError(part.source)


def _piped(state: ShellState, pipe: syntax.Pipe, part: Substitution) -> str:
    """`echo TEXT | cut -d C -f N`, the usual way to split KEY=VALUE."""
    first, *others = [words(state, step.words) if isinstance(step, syntax.Simple) else [] for step in pipe.commands]
    options = " ".join(others[0]) if len(others) == 1 else ""
    field, mark = re.search(r" -f ?(\d+)(?: |$)", options), re.search(r" -d ?(\S)(?: |$)", options)
    if first[:1] != ["echo"] or not options.startswith("cut ") or not field or not mark:
        raise UndecidedError(part.source)
    text_ = symbolic.decided(" ".join(first[1:]))
    pieces = text_.split(mark.group(1))
    at = int(field.group(1)) - 1
    return (pieces[at] if 0 <= at < len(pieces) else "") if mark.group(1) in text_ else text_


def _folder_after(state: ShellState, before: syntax.Body) -> str:
    """The output of `pwd` after `cd` commands. It may be relative, like the paths of a recipe."""
    folder = "."
    for step in before:
        command = words(state, step.words) if isinstance(step, syntax.Simple) else []
        if len(command) != 2 or command[0] != "cd":
            raise UndecidedError("pwd")
        folder = str(PurePosixPath(folder) / command[1])
    return folder


def _only(arguments: list[str]) -> PurePosixPath:
    if not arguments:
        raise UndecidedError("no argument")
    return PurePosixPath(arguments[0])


def _basename(state: ShellState, arguments: list[str]) -> str:
    name = _only(arguments).name
    return name.removesuffix(arguments[1]) if len(arguments) > 1 else name


SUBSTITUTIONS: dict[str, Callable[[ShellState, list[str]], str]] = {
    "echo": lambda state, arguments: " ".join(arguments),
    "dirname": lambda state, arguments: str(_only(arguments).parent),
    "basename": _basename,
    "realpath": lambda state, arguments: str(_only(arguments)),
    "readlink": lambda state, arguments: str(_only(arguments)),
    "expr": lambda state, arguments: str(number(state, (Text(" ".join(arguments), True),))),
}
