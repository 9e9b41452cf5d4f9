"""Parses a command that will run elsewhere, as behind `submit --`, so that its mistakes are found before it is queued.

The words go through the parser of the command itself, which then is not called. A command module may also have a
function `refuse_values(values)` for mistakes that its parser cannot see.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import typer

from steelyard.cli import COMMANDS, app, for_parser
from steelyard.core.errors import UserError

# The commands whose ranks share the work. Of any other command each rank would do all of it.
MANY_RANKS = {("train",), ("sft", "run"), ("eval", "ppl"), ("prune",), ("doctor", "check")}
# The commands that compute on a GPU without a --device option.
ON_GPU = {("train",), ("sft", "run"), ("tune", "run"), ("profile", "run"), ("bench", "sparse"), ("doctor", "check")}


@dataclass(frozen=True)
class ParsedCommand:
    """A command with its subcommand, and the values of its arguments and options by name."""

    path: tuple[str, ...]
    values: dict[str, Any]

    @property
    def uses_gpu(self) -> bool:
        """Whether it computes on a GPU if there is one."""
        return self.path in ON_GPU or self.values.get("device") not in (None, "cpu")

    def refuse_ranks(self, ranks: int) -> None:
        """Raise if several ranks are requested that the command cannot use, or if it would start its own."""
        name = " ".join(self.path)
        if ranks > 1 and self.path not in MANY_RANKS:
            raise UserError(
                f"{name} runs in one process, but {ranks} ranks are requested",
                where="--nodes, --ranks-per-node",
                hint="remove these options: each rank would do the whole work",
            )
        if ranks > 1 and self.values.get("nproc") not in (None, 1):
            raise UserError(
                f"--nproc starts ranks inside each of the {ranks} ranks of the job",
                where=name,
                hint="remove --nproc: --nodes and --ranks-per-node set the number of ranks",
            )


def parsed(words: Sequence[str]) -> ParsedCommand:
    """Parse a command without running it; raises the error that the command would raise."""
    if words[0] not in COMMANDS:
        raise UserError(f"there is no command {words[0]}", hint="steelyard --help lists the commands")
    ready, _, _ = for_parser([*words])
    context: Any = typer.main.get_command(app(ready)).make_context("steelyard", ready)
    path: list[str] = []
    while hasattr(context.command, "resolve_command"):
        name, command, rest = context.command.resolve_command(context, [*context._protected_args, *context.args])
        path.append(str(name))
        context = command.make_context(name, rest, parent=context)
    found = ParsedCommand(tuple(path), context.params)
    refuse = getattr(import_module(f"steelyard.cli.{COMMANDS[path[0]][0]}"), "refuse_values", None)
    if refuse is not None:
        refuse(found.values)
    return found
