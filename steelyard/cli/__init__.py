"""The command line: each command parses its arguments, calls one function, and prints the result.

Each command is a module that is imported only when the command is used, so that `steelyard --help` is fast. `--debug`
and `--quiet` may be anywhere on the command line.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import gc
import os
import re
import signal
import sys
import time
from collections.abc import Sequence
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
        "data": ("data", "Download, convert and tokenize text."),
        "tokenizer": ("tokenizer", "Train, extend, inspect and export tokenizers."),
    },
    "Train": {
        "quickstart": ("quickstart", "Train a small model on this machine in minutes."),
        "init": ("init", "Write a recipe that fits a text and this machine."),
        "recipe": ("recipe", "Check, show, list, migrate and import recipes."),
        "train": ("train", "Train a model from a recipe."),
        "sft": ("sft", "Fine-tune a model on conversations."),
        "adapter": ("adapter", "Merge and export adapters."),
        "tune": ("tune", "Search for the best settings with short runs."),
    },
    "Compress": {
        "prune": ("prune", "Prune a checkpoint in one shot."),
        "mask": ("mask", "Inspect, export and apply masks."),
        "export-sparse": ("export_sparse", "Export a 2:4 model in compressed form."),
    },
    "Evaluate and publish": {
        "eval": ("eval", "Measure perplexity and evaluate tasks."),
        "generate": ("generate", "Generate text with a trained model."),
        "chat": ("chat", "Talk with a model on the terminal."),
        "bench": ("bench", "Benchmark a model on this machine."),
        "checkpoint": ("checkpoint", "Convert, extend, inspect, compare and verify checkpoints of any format."),
        "hub": ("hub", "Upload models to the hub and download them."),
    },
    "Cluster": {
        "plan": ("plan", "Find the best layout for a cluster."),
        "site": ("site", "Describe a Slurm cluster, and test it with a short job."),
        "submit": ("submit", "Run a recipe or any command on this machine, with mpirun or on Slurm."),
        "cancel": ("cancel", "Cancel a submitted job."),
        "shell": ("shell", "Open a shell in a site's container and environment."),
        "doctor": ("doctor", "Check and fix this machine, and explain logs."),
    },
    "Inspect": {
        "list": ("list", "List the runs in a folder and their states."),
        "watch": ("watch", "Monitor a run and diagnose problems."),
        "serve": ("serve", "Show all runs in a folder in a browser, live."),
        "logs": ("logs", "Show the logs of each node and the metrics of its devices."),
        "report": ("report", "Write the report of a run as one HTML file."),
        "profile": ("profile", "Profile a few steps."),
        "run": ("run", "Verify a run folder."),
    },
}
COMMANDS = {name: command for commands in TASKS.values() for name, command in commands.items()}
# Groups with a default command: it is used if the first word is not a command of the group.
DEFAULTS = {
    "sft": ("run", ("run", "preview")),
    "tune": ("run", ("run", "report")),
    "profile": ("run", ("run", "show")),
    "doctor": ("check", ("check", "explain")),
}
# Of these, the ones that run without arguments; the others show their help.
NEED_NO_WORDS = ("doctor",)
# Commands that wait for the user, or that print what other processes print.
INTERACTIVE = ("chat", "hub serve", "logs", "serve", "shell", "submit", "watch")
# Options that take several values after one flag: --input a.txt b.txt
SEVERAL = ("--input", "--json-keys", "--symbols")
# System errors for a path that is wrong in the user's input.
WRONG_PATH = (IsADirectoryError, NotADirectoryError, FileExistsError, PermissionError)
WRONG_PATH_CODES = (errno.ENAMETOOLONG, errno.ELOOP)
LONGEST_NAME = 200  # characters of a path in a message
TOO_MANY_DIGITS = "Exceeds the limit ("  # Python's error for numbers of more than 4300 digits.
# The base class of the parser's errors; typer exports only some of them by name.
UsageError: type[Exception] = typer.BadParameter.__mro__[1]
# New objects until a collection. Imports make a million objects that stay: with Python's 700, collections take
# a seventh of the time to import torch.
OBJECTS_PER_COLLECTION = 100_000
SAME_REQUEST_SECONDS = 1.0
_interrupted_at = -SAME_REQUEST_SECONDS
HELP = "Train, fine-tune, compress, evaluate and publish language models."
EPILOG = "Exit codes: 0 success, 1 the machine or the run failed, 2 wrong input or options, 130 interrupted."


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run one command and exit with its code."""
    # Importing the command `list` rebinds that name in this module, so list() is not used here.
    gc.set_threshold(OBJECTS_PER_COLLECTION)
    words, debug, console.quiet = for_parser([*(sys.argv[1:] if arguments is None else arguments)])
    for number in (signal.SIGINT, signal.SIGUSR1):  # SIGUSR1 is a scheduler's warning, which may come early.
        signal.signal(number, _interrupt)
    try:
        with _never_silent(words):
            outcome = app(words)(args=words, prog_name="steelyard", standalone_mode=False)
        code = outcome if isinstance(outcome, int) else 0
    except SystemExit as exit_:
        code = exit_.code if isinstance(exit_.code, int) else 1
    except Interrupted as interruption:
        message = f"interrupted; {interruption.saved}" if interruption.saved else "interrupted"
        code = _report(interruption, message, interruption.exit_code)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # The reader has exited; print nothing.
        code = 1
    except UsageError as error:
        code = _refuse_usage(error)
    except Exception as error:
        code = _explain(error, debug)
    sys.exit(code)


def for_parser(words: list[str]) -> tuple[list[str], bool, bool]:
    """The words as the parser takes them, and whether --debug and --quiet were among them."""
    own, passed_on = _cut(words)
    debug, quiet = _take(own, "--debug"), _take(own, "--quiet")
    return _with_default([*_flag_each(own), *passed_on]), debug, quiet


def _with_default(words: list[str]) -> list[str]:
    """Insert the default command of a group if none is given."""
    default, known = DEFAULTS.get(words[0], (None, ())) if words else (None, ())
    following = words[1] if len(words) > 1 else "" if words and words[0] in NEED_NO_WORDS else "--help"
    if default is None or following in (*known, "--help"):
        return words
    return [words[0], default, *words[1:]]


def _never_silent(words: list[str]) -> contextlib.AbstractContextManager[None]:
    """Let the console say that a command is running, except for commands that show something all the time."""
    command = [word for word in words[:2] if re.fullmatch("[a-z-]+", word) and not word.startswith("-")]
    is_shown = bool(command) and command[0] not in INTERACTIVE and " ".join(command) not in INTERACTIVE
    if not is_shown or not _is_rank0():
        return contextlib.nullcontext()
    return console.working(" ".join(command))


def _is_rank0() -> bool:
    try:
        return detect(os.environ).is_rank0
    except UserError:  # The command reports it.
        return False


class _ByTask(TyperGroup):
    """Lists the commands by task in `steelyard --help`."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        width = max(map(len, COMMANDS))
        for task, commands in TASKS.items():
            with formatter.section(task):
                formatter.write_dl([(name.ljust(width), help_) for name, (_, help_) in commands.items()])


def app(words: Sequence[str]) -> typer.Typer:
    """The command tree; only the module of the given command is imported."""
    from steelyard.cli.registration import register

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
            register(root, name, help_, module)
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
    quiet: Annotated[bool, typer.Option("--quiet", help="Print only results, warnings and errors.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """`--quiet` and `--debug` are declared here for the help; `main` has already removed them from the arguments."""


def _not_imported() -> None:
    raise AssertionError("only the given command is imported")


def _cut(words: list[str]) -> tuple[list[str], list[str]]:
    """The words before `--`, and those from `--` on, which belong to another program.

    The parser consumes the first `--`, so it is doubled: a command then sees where its own arguments end.
    """
    end = words.index("--") if "--" in words else len(words)
    return words[:end], ["--", *words[end:]] if words[end:] else []


def _take(words: list[str], flag: str) -> bool:
    if flag not in words:
        return False
    words.remove(flag)
    return True


def _flag_each(words: list[str]) -> list[str]:
    """Rewrite `--input a b` to `--input a --input b`, which the parser supports."""
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
    """Print a usage error in the format of other errors; a group without a command shows its help."""
    context, message = getattr(error, "ctx", None), str(getattr(error, "format_message", error.__str__)())
    if message.startswith("Usage:"):
        print(message, file=sys.stderr)
        return UserError.exit_code
    message = message[:1].lower() + message[1:].rstrip(".")
    hint = "" if context is None else f"\n  {context.get_usage()}\n  {context.command_path} --help shows the options"
    console.error(message + hint)
    return UserError.exit_code


def _explain(error: Exception, debug: bool) -> int:
    """Print an error according to its type and return the exit code."""
    if debug:
        console.trace(error)
    if isinstance(error, SteelyardError):
        return _report(error, str(error), error.exit_code)
    if isinstance(error, OSError):
        name = files.final(str(error.filename)) if error.filename else ""
        is_wrong = isinstance(error, WRONG_PATH) or error.errno in WRONG_PATH_CODES
        code = UserError.exit_code if is_wrong else RuntimeFailure.exit_code
        name = name if len(name) <= LONGEST_NAME else f"{name[:LONGEST_NAME]}..."
        return _report(error, f"{error.strerror or error}" + (f": {name}" if name else ""), code)
    if isinstance(error, RecursionError) or str(error).startswith(TOO_MANY_DIGITS):
        problem = (
            "is nested too deeply" if isinstance(error, RecursionError) else "contains a number of thousands of digits"
        )
        return _report(error, f"the input {problem}\n  --debug shows where it was read", UserError.exit_code)
    if isinstance(error, ModuleNotFoundError) and error.name and not error.name.startswith("steelyard"):
        package = error.name.partition(".")[0]
        return _report(error, f"{package} is not installed\n  hint: pip install {package}", RuntimeFailure.exit_code)
    hint = "" if debug else "\n  this is a bug in steelyard; --debug shows the traceback"
    return _report(error, f"{type(error).__name__}: {error}{hint}", RuntimeFailure.exit_code)


def _report(error: BaseException, message: str, code: int) -> int:
    """Print why the command failed, once per job if possible, and return the exit code.

    Under `--nproc` a rank only writes its error file, and the launcher prints the error. Otherwise rank 0 prints errors
    that all ranks share, and any other error is printed with the number of its rank.
    """
    try:
        world = detect(os.environ)
    except UserError:
        world = World()
    shared = isinstance(error, Interrupted) or getattr(error, "shared", False)
    path = os.environ.get(error_file.ERROR_FILE)
    if path and world.size > 1:
        lost_peer, agreed = isinstance(error, LostPeer), isinstance(error, Interrupted) and bool(error.saved)
        record = error_file.ErrorRecord(type(error).__name__, message, code, time.time(), lost_peer, shared, agreed)
        with contextlib.suppress(OSError):
            error_file.leave(Path(path), record)
            return code
    if world.size == 1 or (shared and world.is_rank0):
        console.error(message)
    elif not shared:
        console.error(f"rank {world.rank}: {message}")
    return code


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Stop. A signal within a second is the same request by another route (terminal, launcher, scheduler)."""
    global _interrupted_at
    is_same, _interrupted_at = time.monotonic() - _interrupted_at < SAME_REQUEST_SECONDS, time.monotonic()
    if not is_same:
        raise Interrupted
