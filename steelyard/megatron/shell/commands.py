"""The commands of a script: builtins are interpreted, started scripts are read, all other commands are recorded."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from steelyard.core.errors import UserError
from steelyard.megatron.shell import conditions, parser, symbolic
from steelyard.megatron.shell.shell_state import Command, ShellState
from steelyard.megatron.shell.symbolic import UndecidedError
from steelyard.megatron.shell.syntax import Body, Text

Run = Callable[[ShellState, Body], bool | None]
DEEPEST = 30
SHELLS = {"bash", "sh", "zsh", "dash"}
SCRIPT_ENDS = (".sh", ".bash", ".sbatch", ".slurm", ".job")
SBATCH = re.compile(r"^#SBATCH[ \t]+(.*?)(?:[ \t]#.*)?$", re.MULTILINE)
SUCCEEDING = {"echo", "printf", "cd", "mkdir", "export", "declare", "typeset", "readonly", "local", "shopt", "module"}
# Commands that never hold training flags, whatever their arguments.
SILENT = {
    "echo", "printf", "cd", "mkdir", "shopt", "module", "ulimit", "sleep", "wait", "trap", "pushd", "popd", "rm", "cp",
    "mv", "ln", "cat", "ls", "chmod", "touch", "hostname", "date", "sed", "grep", "awk", "tee", "wget", "curl", "git",
    "pip", "pip3", "conda", "which", "ssh", "tail", "head", "wc", "export", "declare", "typeset", "readonly", "local",
    "alias", "hash", "type", "umask", "kill", "nvidia-smi", "ds_ssh", "ds_report", "deactivate", "apt-get", "patch",
}  # fmt: skip


class LeaveError(Exception):
    """`exit`, `return`, `break` and `continue`; caught by the construct that they leave."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.kind = kind


def read_script(state: ShellState, path: Path, run: Run) -> None:
    """Interpret one file with the given state."""
    text = read_text(path)
    if directives := [word for line in SBATCH.findall(text) for word in line.split()]:
        state.launchers = [*state.launchers, ["sbatch", *directives]]
        _slurm_variables(state, " " + " ".join(directives))
    try:
        run(state, parser.parse(text, str(path)))
    except LeaveError as leave:
        if leave.kind == "exit":
            state.exited = True
            reason = f", after printing: {state.last_output}" if state.last_output else ""
            state.note(f"the script exits here{reason}")


def _slurm_variables(state: ShellState, directives: str) -> None:
    """The variables that Slurm sets from the `#SBATCH` lines, unless the environment has them."""

    def option(pattern: str) -> int | None:
        match = re.search(rf" (?:{pattern})(\d+)(?= |$)", directives)
        return int(match.group(1)) if match else None

    nodes, tasks = option(r"--nodes[= ]|-N ?"), option(r"--ntasks-per-node[= ]")
    gpus = option(r"--gpus-per-node[= ](?:[A-Za-z]\w*:)?|--gres[= ]gpu:(?:[A-Za-z]\w*:)?")
    ranks = option(r"--ntasks[= ]|-n ?") or (nodes * tasks if nodes and tasks else None)
    values = {"NNODES": nodes, "JOB_NUM_NODES": nodes, "NTASKS_PER_NODE": tasks, "NTASKS": ranks, "NPROCS": ranks,
              "GPUS_PER_NODE": gpus, "GPUS_ON_NODE": gpus}  # fmt: skip
    for name, value in values.items():
        if value is not None and state.get(f"SLURM_{name}") is None:
            state.set(f"SLURM_{name}", str(value))
            state.exported.add(f"SLURM_{name}")


def read_text(path: Path) -> str:
    """The text of a script."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise UserError("this is not a text file", where=str(path), hint="give the launch script") from None
    except IsADirectoryError:
        raise UserError("this is a folder", where=str(path), hint="give the launch script in it") from None
    except FileNotFoundError:
        raise UserError("there is no such file", where=str(path)) from None
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}", where=str(path)) from None
    if "\0" in text:
        raise UserError("this is not a text file", where=str(path), hint="give the launch script")
    return symbolic.without_marks(text)


def invoke(state: ShellState, words: list[str], run: Run) -> bool | None:
    """Interpret one command."""
    name, arguments = words[0], words[1:]
    if name in state.functions:
        return _function(state, name, arguments, run)
    if name in ("[", "test"):
        items = arguments[:-1] if name == "[" else arguments
        try:
            return conditions.holds(state, [_plain(item) for item in items], False)
        except UndecidedError as error:
            state.open_question = str(error)
            return None
    if name in BUILTINS:
        return BUILTINS[name](state, arguments, run)
    if name in SILENT:
        if name in ("echo", "printf"):
            state.last_output = symbolic.shown(" ".join(arguments))
        return True if name in SUCCEEDING else None
    return _started(state, words, run)


def _plain(item: str) -> str | tuple[Text, ...]:
    """An already expanded word of `[ ]`; operators are returned unchanged."""
    return item if item in ("!", "(", ")", "-a", "-o") or item.startswith("-") else (Text(item, True),)


def _function(state: ShellState, name: str, arguments: list[str], run: Run) -> bool | None:
    _deeper(state)
    before, state.arguments = state.arguments, arguments
    try:
        return run(state, state.functions[name])
    except LeaveError as leave:
        if leave.kind != "return":
            raise
        return None
    finally:
        state.arguments = before
        state.depth -= 1


def _deeper(state: ShellState) -> None:
    state.depth += 1
    if state.depth > DEEPEST:
        raise state.refuse("scripts or functions call each other in a cycle")


def _source(state: ShellState, arguments: list[str], run: Run) -> bool | None:
    if not arguments:
        return True
    path = _find(state, arguments[0])
    if path is None:
        state.note(f"{arguments[0]} is sourced here but was not found; its settings are missing")
        return True
    _deeper(state)
    file, line, before = state.file, state.line, state.arguments
    try:
        body = parser.parse(read_text(path), str(path))
    except UserError as error:
        state.note(f"{arguments[0]} is sourced here but cannot be read; its settings are missing ({error.message})")
        state.depth -= 1
        return True
    state.file = str(path)
    state.arguments = arguments[1:] or before
    try:
        run(state, body)
    except LeaveError as leave:
        if leave.kind != "return":
            raise
    finally:
        state.file, state.line = file, line
        state.arguments = state.arguments if len(arguments) == 1 else before
        state.depth -= 1
    return True


def _find(state: ShellState, name: str) -> Path | None:
    """The path of a file that a script names: in the folder of the script, or in the working directory."""
    if symbolic.is_unknown(name):
        return None
    for folder in (Path(state.file).parent, Path(state.script).parent, Path()):
        if (folder / name).is_file():
            return folder / name
    return None


def _started(state: ShellState, words: list[str], run: Run) -> bool | None:
    """Interpret a started program: a script is read with its own state, every other command is recorded.

    A missing wrapper (`bash in_container.sh train.sh 0`) is skipped in favour of the script after it.
    """
    missing: int | None = None
    for at, word in enumerate(words):
        name = word.rpartition("/")[2]
        if name.endswith(".py"):
            missing = None
            break
        if name in SHELLS and len(words) > at + 2 and words[at + 1] in ("-c", "-lc", "-xc"):
            return _inline(state, words, at, run)
        if word.endswith(SCRIPT_ENDS) or (at and words[at - 1].rpartition("/")[2] in SHELLS and word[:1] not in "-"):
            if (path := _find(state, word)) is not None:
                return _script(state, words, at, path, run)
            missing = at if missing is None else missing
    if missing is not None:
        given = f" with the arguments {' '.join(words[missing + 1 :])}" if words[missing + 1 :] else ""
        how = "give it as a SCRIPT, and its arguments after --"
        state.missing.append(words[missing])
        state.note(f"{words[missing]} is started here{given} but was not found; {how}")
        return None
    state.commands.append(Command(words, state.where, list(state.launchers)))
    return None


def _inline(state: ShellState, words: list[str], at: int, run: Run) -> bool:
    """`bash -c "..."`, possibly after a launcher."""
    _deeper(state)
    child = state.child(state.file, words[at + 4 :])
    child.line = state.line
    child.launchers = [*state.launchers, words[:at]] if at else state.launchers
    with suppress(LeaveError):
        run(child, parser.parse(symbolic.shown(words[at + 2]), state.file, state.line))
    state.depth -= 1
    return True


def _script(state: ShellState, words: list[str], at: int, path: Path, run: Run) -> bool:
    _deeper(state)
    child = state.child(str(path), words[at + 1 :])
    launcher = [word for word in words[:at] if word.rpartition("/")[2] not in SHELLS]
    child.launchers = [*state.launchers, launcher] if launcher else state.launchers
    read_script(child, path, run)
    state.depth -= 1
    return True


def _shift(state: ShellState, arguments: list[str], run: Run) -> bool:
    count = int(arguments[0]) if arguments and arguments[0].isdigit() else 1
    enough = count <= len(state.arguments)
    state.arguments = state.arguments[count:] if enough else state.arguments
    return enough


def _set(state: ShellState, arguments: list[str], run: Run) -> bool:
    if "--" in arguments:
        state.arguments = arguments[arguments.index("--") + 1 :]
    return True


def _unset(state: ShellState, arguments: list[str], run: Run) -> bool:
    for name in arguments:
        state.variables.pop(name, None)
    return True


def _read(state: ShellState, arguments: list[str], run: Run) -> bool:
    for name in arguments:
        if not name.startswith("-"):
            state.set(name, symbolic.computed(f"${name}"))
    return True


def _eval(state: ShellState, arguments: list[str], run: Run) -> bool | None:
    """Bash's eval: the text is interpreted as a script."""
    _deeper(state)
    outcome = run(state, parser.parse(symbolic.shown(" ".join(arguments)), state.file, state.line))
    state.depth -= 1
    return outcome


def _leave(kind: str) -> Callable[[ShellState, list[str], Run], bool | None]:
    def leave(state: ShellState, arguments: list[str], run: Run) -> bool | None:
        raise LeaveError(kind)

    return leave


BUILTINS: dict[str, Callable[[ShellState, list[str], Run], bool | None]] = {
    "true": lambda state, arguments, run: True,
    ":": lambda state, arguments, run: True,
    "false": lambda state, arguments, run: False,
    "source": _source,
    ".": _source,
    "shift": _shift,
    "set": _set,
    "unset": _unset,
    "read": _read,
    "eval": _eval,
    **{kind: _leave(kind) for kind in ("exit", "return", "break", "continue")},
}
