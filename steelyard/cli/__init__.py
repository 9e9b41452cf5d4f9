"""The command line: parse, call one function, print.

Each command lives in a module of its own that is imported only when it is asked for, so that `steelyard --help` costs
next to nothing. `--debug` and `--quiet` are understood anywhere on the line.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import os
import signal
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

import steelyard
from steelyard.core import files
from steelyard.core.console import console
from steelyard.core.errors import Interrupted, RuntimeFailure, SteelyardError, UserError
from steelyard.launch import error_file
from steelyard.parallel.world import LostPeer, World, detect

# Every command by task, in the order of the help: its module below `steelyard.cli`, and its line in the help.
TASKS = {
    "Data": {
        "data": ("data", "Fetch and convert text, and turn it into token files."),
        "tokenizer": ("tokenizer", "Train, look at and export tokenizers."),
    },
    "Train": {
        "quickstart": ("quickstart", "Train a small model here, in minutes."),
        "recipe": ("recipe", "Check, show, list and import recipes."),
        "train": ("train", "Train a model as a recipe says."),
        "sft": ("sft", "Tune a model on conversations."),
        "adapter": ("adapter", "Fold adapters into the weights they belong to."),
        "tune": ("tune", "Search the best settings by short real runs."),
    },
    "Compress": {
        "prune": ("prune", "Prune a checkpoint in one shot."),
        "mask": ("mask", "Look at masks, and apply them to weights."),
        "export-sparse": ("export_sparse", "Write a 2:4 model compressed."),
    },
    "Evaluate and publish": {
        "eval": ("eval", "Measure perplexity, and score tasks."),
        "generate": ("generate", "Let a trained model write."),
        "bench": ("bench", "Measure how fast a model runs here."),
        "checkpoint": ("checkpoint", "Convert, look at, compare and verify checkpoints of any format."),
        "hub": ("hub", "Publish models on the hub, and fetch them from it."),
    },
    "Cluster": {
        "plan": ("plan", "Find the best layout for the machines at hand."),
        "submit": ("submit", "Run a recipe, or any command, here, over mpirun or on Slurm."),
        "cancel": ("cancel", "End a job that was submitted."),
        "shell": ("shell", "Open a shell inside a site's container and environment."),
        "doctor": ("doctor", "Say whether this machine is fit, mend it, and explain logs."),
    },
    "Inspect": {
        "list": ("list", "List the runs under a folder and how they stand."),
        "watch": ("watch", "Follow a run, and tell what is wrong with it."),
        "serve": ("serve", "Show all runs below a folder in a browser, live."),
        "logs": ("logs", "Show what each node printed, and what its devices did."),
        "report": ("report", "Write a run's report as one HTML file."),
        "profile": ("profile", "Look at a few steps with a profiler."),
        "run": ("run", "Check a run folder."),
    },
}
COMMANDS = {name: command for commands in TASKS.values() for name, command in commands.items()}
# Groups with a command that need not be named: a first word that names none of the others belongs to it.
DEFAULTS = {
    "sft": ("run", ("run", "preview")),
    "tune": ("run", ("run", "report")),
    "profile": ("run", ("run", "show")),
    "doctor": ("check", ("check", "explain")),
}
# Of these, the ones that have an answer to no words at all; the others show their help.
NEED_NO_WORDS = ("doctor",)
# Options that take several values after one flag, as people write them: --input a.txt b.txt
SEVERAL = ("--input", "--json-keys", "--symbols")
# What the system says of a path that the user should not have named.
WRONG_PATH = (IsADirectoryError, NotADirectoryError, FileExistsError, PermissionError)
WRONG_PATH_CODES = (errno.ENAMETOOLONG, errno.ELOOP)
LONGEST_NAME = 200  # characters of a path in a message
TOO_MANY_DIGITS = "Exceeds the limit ("  # Python's own error for numbers of more than 4300 digits.
# The parser's own errors; typer shows only some of them by name.
UsageError: type[Exception] = typer.BadParameter.__mro__[1]
SAME_REQUEST_SECONDS = 1.0
_interrupted_at = -SAME_REQUEST_SECONDS
HELP = "Text and GPUs in, a trained and published language model out."
EPILOG = "Exit codes: 0 done, 1 a fault of the machine or the work, 2 a mistake in what was asked, 130 interrupted."


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run one command and exit with its code."""
    # The command `list`, once loaded, is what that name means in here.
    words, passed_on = _cut([*(sys.argv[1:] if arguments is None else arguments)])
    debug = _take(words, "--debug")
    console.quiet = _take(words, "--quiet")
    words = _with_default([*_flag_each(words), *passed_on])
    for number in (signal.SIGINT, signal.SIGUSR1):  # SIGUSR1 is a scheduler's warning, which may come early.
        signal.signal(number, _interrupt)
    try:
        outcome = app(words)(args=words, prog_name="steelyard", standalone_mode=False)
        code = outcome if isinstance(outcome, int) else 0
    except SystemExit as exit_:
        code = exit_.code if isinstance(exit_.code, int) else 1
    except Interrupted as interruption:
        message = f"interrupted; {interruption.saved}" if interruption.saved else "interrupted"
        code = _tell(interruption, message, interruption.exit_code)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # The reader has left; so do we, without a word.
        code = 1
    except UsageError as error:
        code = _refuse_usage(error)
    except Exception as error:
        code = _explain(error, debug)
    sys.exit(code)


def _with_default(words: list[str]) -> list[str]:
    """Name the command of a group that was left out."""
    default, known = DEFAULTS.get(words[0], (None, ())) if words else (None, ())
    following = words[1] if len(words) > 1 else "" if words and words[0] in NEED_NO_WORDS else "--help"
    if default is None or following in (*known, "--help"):
        return words
    return [words[0], default, *words[1:]]


class _ByTask(TyperGroup):
    """The help of `steelyard` itself lists the commands under their tasks."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        width = max(map(len, COMMANDS))
        for task, commands in TASKS.items():
            with formatter.section(task):
                formatter.write_dl([(name.ljust(width), help_) for name, (_, help_) in commands.items()])


def app(words: Sequence[str]) -> typer.Typer:
    """The command tree, of which only the command that is asked for is really there."""
    root = typer.Typer(
        help=HELP, epilog=EPILOG, rich_markup_mode=None, add_completion=False, pretty_exceptions_enable=False,
        no_args_is_help=True, cls=_ByTask,
    )  # fmt: skip
    root.callback()(_root)
    wanted = next((word for word in words if not word.startswith("-")), None)
    if wanted is not None and wanted not in COMMANDS:
        _refuse_unknown(wanted)
    for name, (module, help_) in COMMANDS.items():
        if name == wanted:
            import_module(f"steelyard.cli.{module}").register(root, name, help_)
        else:
            root.command(name, help=help_)(_not_imported)
    return root


def _print_version(wanted: bool) -> None:
    if wanted:
        print(steelyard.__version__)
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print results and problems only.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """`--quiet` and `--debug` stand here for the help; `main` has taken them off the line already."""


def _not_imported() -> None:
    raise AssertionError("only the command that was asked for is imported")


def _cut(words: list[str]) -> tuple[list[str], list[str]]:
    """The words before `--`, and those from it on, which are another program's.

    The parser swallows a first `--`, so that one is doubled: a command then sees where its own words end.
    """
    end = words.index("--") if "--" in words else len(words)
    return words[:end], ["--", *words[end:]] if words[end:] else []


def _take(words: list[str], flag: str) -> bool:
    if flag not in words:
        return False
    words.remove(flag)
    return True


def _flag_each(words: list[str]) -> list[str]:
    """`--input a b` as `--input a --input b`, which is what the parser knows."""
    spread: list[str] = []
    flag: str | None = None
    for word in words:
        if word.startswith("-"):
            flag = word if word in SEVERAL else None
        elif flag is not None and spread[-1] != flag:
            spread.append(flag)
        spread.append(word)
    return spread


def _refuse_unknown(word: str) -> NoReturn:
    near = difflib.get_close_matches(word, COMMANDS, n=1)
    console.error(
        f"there is no command {word}" + (f"\n  did you mean {near[0]}?" if near else "\n  see steelyard --help")
    )
    sys.exit(2)


def _refuse_usage(error: Exception) -> int:
    """Tell words that a command does not take as any other mistake is told; a group alone shows its help."""
    context, message = getattr(error, "ctx", None), str(getattr(error, "format_message", error.__str__)())
    if message.startswith("Usage:"):
        print(message, file=sys.stderr)
        return UserError.exit_code
    message = message[:1].lower() + message[1:].rstrip(".")
    hint = "" if context is None else f"\n  {context.get_usage()}\n  {context.command_path} --help tells more"
    console.error(message + hint)
    return UserError.exit_code


def _explain(error: Exception, debug: bool) -> int:
    """Print an error as its kind deserves and return the exit code."""
    if debug:
        console.trace(error)
    if isinstance(error, SteelyardError):
        return _tell(error, str(error), error.exit_code)
    if isinstance(error, OSError):
        name = files.final(str(error.filename)) if error.filename else ""
        is_wrong = isinstance(error, WRONG_PATH) or error.errno in WRONG_PATH_CODES
        code = UserError.exit_code if is_wrong else RuntimeFailure.exit_code
        name = name if len(name) <= LONGEST_NAME else f"{name[:LONGEST_NAME]}..."
        return _tell(error, f"{error.strerror or error}" + (f": {name}" if name else ""), code)
    if isinstance(error, RecursionError) or str(error).startswith(TOO_MANY_DIGITS):
        reported = (
            "is nested too deeply" if isinstance(error, RecursionError) else "holds a number of thousands of digits"
        )
        return _tell(error, f"what was given {reported}\n  --debug shows where it was read", UserError.exit_code)
    hint = "" if debug else "\n  this is a bug in steelyard; --debug shows where"
    return _tell(error, f"{type(error).__name__}: {error}{hint}", RuntimeFailure.exit_code)


def _tell(error: BaseException, message: str, code: int) -> int:
    """Say why the command failed, once per job as far as that can be known, and return the exit code.

    Under `--nproc` the launcher tells it, and a rank only leaves word. Elsewhere rank 0 tells what all ranks share, and
    any other error carries the number of its rank.
    """
    try:
        world = detect(os.environ)
    except UserError:
        world = World()
    shared = isinstance(error, Interrupted) or getattr(error, "shared", False)
    path = os.environ.get(error_file.ERROR_FILE)
    if path and world.size > 1:
        lost_peer, agreed = isinstance(error, LostPeer), isinstance(error, Interrupted) and bool(error.saved)
        words = error_file.ErrorRecord(type(error).__name__, message, code, time.time(), lost_peer, shared, agreed)
        with contextlib.suppress(OSError):
            error_file.leave(Path(path), words)
            return code
    if world.size == 1 or (shared and world.is_rank0):
        console.error(message)
    elif not shared:
        console.error(f"rank {world.rank}: {message}")
    return code


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Stop; what comes within a second is the same request over another road (terminal, launcher, scheduler)."""
    global _interrupted_at
    is_same, _interrupted_at = time.monotonic() - _interrupted_at < SAME_REQUEST_SECONDS, time.monotonic()
    if not is_same:
        raise Interrupted
