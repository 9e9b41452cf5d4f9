"""The state of the interpreter: variables, arguments and functions, and the commands and notes so far."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from steelyard.core.errors import UserError
from steelyard.megatron.shell import symbolic
from steelyard.megatron.shell.syntax import Body

LONGEST = 1_000_000
MOST_STATEMENTS = 50_000


@dataclass
class Decisions:
    """The options taken at undecided conditions, in order; the first ones may be given. Option 0 is the default."""

    given: tuple[int, ...] = ()
    made: list[tuple[int, int]] = field(default_factory=list)

    def choose(self, options: int) -> int:
        """The option to take at an undecided condition with this many options."""
        at = len(self.made)
        option = min(self.given[at] if at < len(self.given) else 0, options - 1)
        self.made.append((option, options))
        return option

    def following(self) -> tuple[int, ...] | None:
        """The next path to try: the last decision that has another option takes it; None if all were tried."""
        for at in reversed(range(len(self.made))):
            option, options = self.made[at]
            if option + 1 < options:
                return (*(taken for taken, _ in self.made[:at]), option + 1)
        return None


@dataclass(frozen=True)
class Command:
    """A command with its words expanded, and the launchers around it (`mpirun ... run.sh`), outermost first."""

    words: list[str]
    where: str
    launchers: list[list[str]] = field(default_factory=list)


@dataclass
class ShellState:
    """The state of one script. Commands, notes, decisions and counters are shared by all scripts of a conversion.

    `files` has the files that the scripts write, `missing` the scripts that they start and that are not here.
    """

    file: str
    script: str
    arguments: list[str]
    variables: dict[str, str | list[str]] = field(default_factory=dict)
    exported: set[str] = field(default_factory=set)
    functions: dict[str, Body] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    launchers: list[list[str]] = field(default_factory=list)
    commands: list[Command] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    line: int = 1
    depth: int = 0
    last_output: str = ""
    open_question: str = ""
    exited: bool = False
    spent: list[int] = field(default_factory=lambda: [0])
    decisions: Decisions = field(default_factory=Decisions)
    files: dict[str, str] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)

    @property
    def where(self) -> str:
        """File and line of the current statement."""
        return f"{self.file}:{self.line}"

    def refuse(self, message: str, hint: str | None = None) -> UserError:
        """The error for a script that cannot be interpreted."""
        return UserError(message, where=self.where, hint=hint)

    def note(self, message: str) -> None:
        """Add a note for the user."""
        note = f"{self.where}: {symbolic.shown(message)}"
        if note not in self.notes:
            self.notes.append(note)

    def get(self, name: str) -> str | list[str] | None:
        """A variable of the script or of the environment."""
        return self.variables[name] if name in self.variables else self.environment.get(name)

    def set(self, name: str, value: str | list[str]) -> None:
        """Set a variable."""
        if len(value) > LONGEST:
            raise self.refuse(f"{name} grows without bound")
        self.variables[name] = value

    def spend(self) -> None:
        """Count one statement, so that no script runs forever."""
        self.spent[0] += 1
        if self.spent[0] > MOST_STATEMENTS:
            raise self.refuse(f"this script runs more than {MOST_STATEMENTS} statements")

    def argument(self, number: int) -> str | None:
        """`$0`, `$1`, ...; None if it was not given."""
        if number == 0:
            return self.script
        return self.arguments[number - 1] if number <= len(self.arguments) else None

    def child(self, file: str, arguments: list[str]) -> ShellState:
        """The state of a script that this one starts as a process: it inherits exported variables."""
        inherited = {name: value for name, value in self.variables.items() if name in self.exported}
        return ShellState(
            file, file, arguments, inherited, set(self.exported), {}, self.environment, self.launchers,
            self.commands, self.notes, depth=self.depth, spent=self.spent, decisions=self.decisions, files=self.files,
            missing=self.missing,
        )  # fmt: skip
