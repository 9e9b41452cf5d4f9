"""The syntax tree of a bash script: words made of parts, and statements made of words.

It covers only the bash that launch scripts use. `parser.py` builds it from a text, `interpreter.py` walks it. A part
keeps its source text, which messages show for an expansion that cannot be evaluated.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Text:
    """Literal characters."""

    value: str
    quoted: bool = False


@dataclass(frozen=True)
class Parameter:
    """`$name`, `${name}`, `${name[index]}`, `${name:-argument}` and similar; `length` is `${#name}`."""

    name: str
    source: str
    quoted: bool = False
    index: Word | None = None
    operator: str = ""
    argument: Word = ()
    length: bool = False


@dataclass(frozen=True)
class Arithmetic:
    """`$(( ... ))`."""

    expression: Word
    source: str
    quoted: bool = False


@dataclass(frozen=True)
class Substitution:
    """`$( ... )` or backticks: a script that is replaced by its output."""

    script: str
    source: str
    line: int
    quoted: bool = False


Part = Text | Parameter | Arithmetic | Substitution
Word = tuple[Part, ...]


@dataclass(frozen=True)
class Assignment:
    """`name=word`, `name+=word`, `name[index]=word`, `name=( words )`."""

    name: str
    value: Word | list[Word]
    append: bool = False
    index: Word | None = None


@dataclass
class Simple:
    """Assignments and a command; either may be missing.

    `document` is the text of a here-document, `output` the file of `> file`.
    """

    line: int
    assignments: list[Assignment] = field(default_factory=list)
    words: list[Word] = field(default_factory=list)
    document: Word | None = None
    output: Word | None = None


@dataclass
class Test:
    """`[[ ... ]]`: words and operators; operators are plain strings."""

    line: int
    items: list[Word | str]


@dataclass
class Compute:
    """`(( ... ))` as a command."""

    line: int
    expression: Word


@dataclass
class Chain:
    """`left && right` or `left || right`."""

    left: Statement
    operator: str
    right: Statement


@dataclass
class Pipe:
    """Commands joined by `|`, possibly negated."""

    commands: list[Statement]
    negated: bool = False


@dataclass
class CommandGroup:
    """`{ ... }`, or `( ... )` with `inside`, whose changes are local."""

    body: Body
    inside: bool


@dataclass
class If:
    """`if`, every `elif`, and `else`."""

    line: int
    branches: list[tuple[Body, Body]]
    otherwise: Body


@dataclass
class Case:
    """`case word in patterns) body ;; esac`."""

    line: int
    word: Word
    branches: list[tuple[list[Word], Body]]


@dataclass
class For:
    """`for name in words`, or `for name` over the arguments if `words` is None."""

    line: int
    name: str
    words: list[Word] | None
    body: Body


@dataclass
class Count:
    """`for (( first; condition; after ))`."""

    line: int
    first: Word
    condition: Word
    after: Word
    body: Body


@dataclass
class While:
    """`while`, or `until` if `wanted` is false."""

    line: int
    condition: Body
    body: Body
    wanted: bool


@dataclass
class Function:
    """A function definition."""

    name: str
    body: Body


Statement = Simple | Test | Compute | Chain | Pipe | CommandGroup | If | Case | For | Count | While | Function
Body = list[Statement]
