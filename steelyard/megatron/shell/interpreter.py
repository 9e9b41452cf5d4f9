"""Following a launch script without running it.

This is no shell: nothing is started, written or fetched. Variables are set, conditions decided, loops unrolled and
files sourced as bash would; every other command is kept with its words expanded. Where the way depends on something
only a running script could know, that is noted and the branch is left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from steelyard.megatron.shell import commands, conditions, expansion, parser, symbolic, syntax
from steelyard.megatron.shell.commands import LeaveError
from steelyard.megatron.shell.shell_state import ShellState
from steelyard.megatron.shell.symbolic import UndecidedError
from steelyard.megatron.shell.syntax import Body, Statement

MOST_TURNS = 500


def follow(scripts: Sequence[Path], arguments: Sequence[str], environment: Mapping[str, str]) -> ShellState:
    """Read scripts in turn, as if one sourced the next, each with the same arguments."""
    state = ShellState(str(scripts[0]), str(scripts[0]), list(arguments), environment=environment)
    for script in scripts:
        state.file = state.script = str(script)
        state.arguments = list(arguments)
        try:
            commands.read_script(state, script, run)
        except RecursionError:
            raise state.refuse("this script is nested too deeply") from None
    return state


def run(state: ShellState, body: Body) -> bool | None:
    """Follow statements; the outcome is the last one's."""
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
    """A command's outcome is not known, and is taken to be success, as its author hoped."""
    left = _statement(state, chain.left)
    goes_on = left is not False if chain.operator == "&&" else left is False
    return _statement(state, chain.right) if goes_on else left


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
            _left_out(state, "condition")
    return run(state, statement.otherwise)


def _case(state: ShellState, case: syntax.Case) -> bool | None:
    try:
        value = symbolic.decided(expansion.text(state, case.word))
    except UndecidedError as error:
        state.open_question = str(error)
        _left_out(state, "case")
        return None
    for patterns, body in case.branches:
        if any(expansion.pattern(state, pattern).fullmatch(value) for pattern in patterns):
            return run(state, body)
    return True


def _loop(state: ShellState, loop: syntax.For | syntax.Count | syntax.While) -> bool | None:
    if isinstance(loop, syntax.For):
        values = state.arguments if loop.words is None else expansion.words(state, loop.words)
        for value in [value for value in values if not symbolic.is_unset(value)]:
            state.set(loop.name, value)
            if not _turn(state, loop.body):
                break
        return True
    if isinstance(loop, syntax.Count) and _decided(state, lambda: [expansion.number(state, loop.first)]) is None:
        _left_out(state, "loop")
        return None
    for _ in range(MOST_TURNS):
        goes_on = _goes_on(state, loop)
        if goes_on is None:
            _left_out(state, "loop")
            return None
        if not goes_on or not _turn(state, loop.body):
            return True
        if isinstance(loop, syntax.Count):
            expansion.number(state, loop.after)
    state.line = loop.line
    state.note(f"this loop was left after {MOST_TURNS} turns")
    return None


def _goes_on(state: ShellState, loop: syntax.Count | syntax.While) -> bool | None:
    if isinstance(loop, syntax.Count):
        return _decided(state, lambda: expansion.number(state, loop.condition) != 0)
    outcome = run(state, loop.condition)
    return None if outcome is None else outcome == loop.wanted


def _left_out(state: ShellState, what: str) -> None:
    """Note why a way was not taken."""
    reason = state.open_question or "the outcome of a program"
    state.open_question = ""
    given = " (give it after --)" if re.fullmatch(r"\$\{?\d\}?", reason) else ""
    state.note(f"this {what} depends on {reason}{given}, which is not known here; it was left out")


def _turn(state: ShellState, body: Body) -> bool:
    """One turn of a loop; false when it was the last."""
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
    if words[0] == "export":
        state.exported |= {assignment.name for assignment in simple.assignments} | set(words[1:])
    while len(words) > 1 and words[0] in ("exec", "command", "builtin", "time", "nohup", "env", "sudo"):
        words = words[1:]
    before = dict(state.variables)
    if simple.assignments and not declares:  # They hold for this command alone.
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
        kept = old if isinstance(old, list) else [] if old is None else [old]
        state.set(assignment.name, [*kept, *entries] if assignment.append else entries)
        return
    value = expansion.text(state, assignment.value)
    if assignment.index is not None:
        entries = list(old) if isinstance(old, list) else []
        at = _place(state, assignment)
        if at is not None:
            state.set(assignment.name, [*entries[:at], *[""] * (at - len(entries)), value, *entries[at + 1 :]])
    elif isinstance(old, list) and assignment.append:
        state.set(assignment.name, [(old[0] if old else "") + value, *old[1:]])
    else:
        state.set(assignment.name, (old if isinstance(old, str) else "") + value if assignment.append else value)


def _place(state: ShellState, assignment: syntax.Assignment) -> int | None:
    """Which entry of an array is meant; None for one that goes by name, or lies beyond reason."""
    try:
        at = expansion.number(state, assignment.index or ())
    except UndecidedError:
        at = -1
    if 0 <= at <= MOST_TURNS:
        return at
    state.note(f"this entry of {assignment.name} goes by a name that is not a number; it was left out")
    return None
