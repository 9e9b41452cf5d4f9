"""Interprets a launch script without side effects.

No program is started, and nothing is written or downloaded. Variables, conditions, loops and sourced files are
evaluated as in bash; every other command is recorded with its words expanded.

A condition that depends on a value that only a running script knows (a file, the output of a program) counts as false,
with a note. If the script then does not train, the other paths are tried.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from steelyard.core.errors import UserError
from steelyard.megatron.shell import commands, conditions, expansion, parser, symbolic, syntax
from steelyard.megatron.shell.commands import LeaveError
from steelyard.megatron.shell.shell_state import Decisions, ShellState
from steelyard.megatron.shell.symbolic import UndecidedError
from steelyard.megatron.shell.syntax import Body, Statement

MOST_ITERATIONS = 500
MOST_PATHS = 64


def follow(
    scripts: Sequence[Path],
    arguments: Sequence[str],
    environment: Mapping[str, str],
    trains: Callable[[ShellState], bool] = lambda state: True,
) -> ShellState:
    """Interpret scripts in order, as if one sourced the next, each with the same arguments.

    Undecided conditions take the first path on which the scripts train; without one, the first that does not exit.
    """
    spent, given, states = [0], tuple[int, ...](), list[ShellState]()
    for _ in range(MOST_PATHS):
        state = ShellState(str(scripts[0]), str(scripts[0]), list(arguments), environment=environment, spent=spent)
        state.decisions = Decisions(given)
        try:
            _follow_one(state, scripts, arguments)
        except UserError:
            if not states:
                raise
            break
        states.append(state)
        following = state.decisions.following()
        if trains(state) or following is None:
            break
        given = following
    return states[-1] if trains(states[-1]) else next((state for state in states if not state.exited), states[0])


def _follow_one(state: ShellState, scripts: Sequence[Path], arguments: Sequence[str]) -> None:
    for script in scripts:
        state.file = state.script = str(script)
        state.arguments = list(arguments)
        try:
            commands.read_script(state, script, run)
        except RecursionError:
            raise state.refuse("this script is nested too deeply") from None


def run(state: ShellState, body: Body) -> bool | None:
    """Interpret statements; returns the outcome of the last one, None if unknown."""
    outcome: bool | None = True
    for statement in body:
        outcome = _statement(state, statement)
    return outcome


def _statement(state: ShellState, statement: Statement) -> bool | None:
    state.spend()
    state.line = getattr(statement, "line", state.line)
    match statement:
        case syntax.Simple():
            return _simple(state, statement)
        case syntax.Test():
            return _decided(state, lambda: conditions.holds(state, statement.items, True))
        case syntax.Compute():
            return _decided(state, lambda: expansion.number(state, statement.expression) != 0)
        case syntax.Chain():
            return _chain(state, statement)
        case syntax.Pipe():
            outcomes = [_statement(state, command) for command in statement.commands]
            return not outcomes[-1] if statement.negated and outcomes[-1] is not None else outcomes[-1]
        case syntax.CommandGroup():
            return _group(state, statement)
        case syntax.If():
            return _if(state, statement)
        case syntax.Case():
            return _case(state, statement)
        case syntax.Function():
            state.functions[statement.name] = statement.body
            return True
        case _:
            return _loop(state, statement)


def _decided(state: ShellState, question: Callable[[], object]) -> bool | None:
    try:
        return bool(question())
    except UndecidedError as error:
        state.open_question = str(error)
        return None


def _chain(state: ShellState, chain: syntax.Chain) -> bool | None:
    """Interpret `&&` and `||`. A program whose exit status is unknown succeeds, an undecided test is false."""
    state.open_question = ""
    left = _statement(state, chain.left)
    if left is None and state.open_question:
        left = _option(state, "test") == 1
    runs_right = left is not False if chain.operator == "&&" else left is False
    return _statement(state, chain.right) if runs_right else left


def _group(state: ShellState, group: syntax.CommandGroup) -> bool | None:
    if not group.inside:
        return run(state, group.body)
    before = dict(state.variables)
    try:
        return run(state, group.body)
    finally:
        state.variables = before


def _if(state: ShellState, statement: syntax.If) -> bool | None:
    for condition, body in statement.branches:
        line = state.line
        outcome = run(state, condition)
        if outcome:
            return run(state, body)
        if outcome is None:
            state.line = line
            if _option(state, "condition"):
                return run(state, body)
    return run(state, statement.otherwise)


def _case(state: ShellState, case: syntax.Case) -> bool | None:
    try:
        value = symbolic.decided(expansion.text(state, case.word))
    except UndecidedError as error:
        state.open_question = str(error)
        option = _option(state, "case", 1 + len(case.branches))
        return run(state, case.branches[option - 1][1]) if option else None
    for patterns, body in case.branches:
        if any(expansion.pattern(state, pattern).fullmatch(value) for pattern in patterns):
            return run(state, body)
    return True


def _loop(state: ShellState, loop: syntax.For | syntax.Count | syntax.While) -> bool | None:
    if isinstance(loop, syntax.For):
        values = state.arguments if loop.words is None else expansion.words(state, loop.words)
        for value in [value for value in values if not symbolic.is_unset(value)]:
            state.set(loop.name, value)
            if not _iterate(state, loop.body):
                break
        return True
    if isinstance(loop, syntax.Count) and _decided(state, lambda: [expansion.number(state, loop.first)]) is None:
        _note(state, "loop", "it was skipped")
        return None
    for _ in range(MOST_ITERATIONS):
        condition = _loop_condition(state, loop)
        if condition is None:
            _note(state, "loop", "it was skipped")
            return None
        if not condition or not _iterate(state, loop.body):
            return True
        if isinstance(loop, syntax.Count):
            expansion.number(state, loop.after)
    state.line = loop.line
    state.note(f"this loop was stopped after {MOST_ITERATIONS} iterations")
    return None


def _loop_condition(state: ShellState, loop: syntax.Count | syntax.While) -> bool | None:
    if isinstance(loop, syntax.Count):
        return _decided(state, lambda: expansion.number(state, loop.condition) != 0)
    outcome = run(state, loop.condition)
    return None if outcome is None else outcome == loop.wanted


def _option(state: ShellState, what: str, options: int = 2) -> int:
    """The option to take at an undecided condition; 0 skips it."""
    option = state.decisions.choose(options)
    _note(state, what, "it was skipped" if not option else "it was followed, because otherwise no training starts")
    return option


def _note(state: ShellState, what: str, outcome: str) -> None:
    """Note what an undecided condition depends on, and what was done."""
    reason = state.open_question or "the exit status of a program"
    state.open_question = ""
    given = " (pass it after --)" if re.fullmatch(r"\$\{?\d\}?", reason) else ""
    state.note(f"this {what} depends on {reason}{given}, which is not known; {outcome}")


def _iterate(state: ShellState, body: Body) -> bool:
    """Interpret one iteration of a loop; returns false after `break`."""
    try:
        run(state, body)
    except LeaveError as leave:
        if leave.kind not in ("break", "continue"):
            raise
        return leave.kind == "continue"
    return True


def _simple(state: ShellState, simple: syntax.Simple) -> bool | None:
    words = expansion.words(state, simple.words)
    declares = bool(words) and words[0] in parser.DECLARATIONS
    if not words or declares:
        for assignment in simple.assignments:
            _assign(state, assignment)
    if not words:
        return True
    if declares:
        for word in words[1:]:  # export "$KEY"="$VALUE"
            name, equals, value = word.partition("=")
            if equals and name.isidentifier():
                state.set(name, value)
            elif equals and symbolic.is_unknown(name):
                state.note(f"the name of the variable {name} is not known; it is not set")
    if words[0] == "export":
        named = {word.partition("=")[0] for word in words[1:]}
        state.exported |= {assignment.name for assignment in simple.assignments} | named
    if words[0] == "cat" and simple.document is not None and simple.output is not None:
        written = symbolic.shown(expansion.text(state, simple.document))
        state.files[symbolic.shown(expansion.text(state, simple.output))] = written
    while len(words) > 1 and words[0] in ("exec", "command", "builtin", "time", "nohup", "env", "sudo"):
        words = words[1:]
    before = dict(state.variables)
    if simple.assignments and not declares:  # They apply to this command only.
        for assignment in simple.assignments:
            _assign(state, assignment)
            state.exported.add(assignment.name)
        try:
            return commands.invoke(state, words, run)
        finally:
            state.variables = before
    return commands.invoke(state, words, run)


def _assign(state: ShellState, assignment: syntax.Assignment) -> None:
    old = state.get(assignment.name)
    if isinstance(assignment.value, list):
        entries = expansion.words(state, assignment.value)
        earlier = old if isinstance(old, list) else [] if old is None else [old]
        state.set(assignment.name, [*earlier, *entries] if assignment.append else entries)
        return
    value = expansion.text(state, assignment.value)
    if assignment.index is not None:
        entries = list(old) if isinstance(old, list) else []
        at = _array_index(state, assignment)
        if at is not None:
            state.set(assignment.name, [*entries[:at], *[""] * (at - len(entries)), value, *entries[at + 1 :]])
    elif isinstance(old, list) and assignment.append:
        state.set(assignment.name, [(old[0] if old else "") + value, *old[1:]])
    else:
        state.set(assignment.name, (old if isinstance(old, str) else "") + value if assignment.append else value)


def _array_index(state: ShellState, assignment: syntax.Assignment) -> int | None:
    """The index of an array entry; None if it is not a number or too large."""
    try:
        at = expansion.number(state, assignment.index or ())
    except UndecidedError:
        at = -1
    if 0 <= at <= MOST_ITERATIONS:
        return at
    state.note(f"the index of this entry of {assignment.name} is not a supported number; it was skipped")
    return None
