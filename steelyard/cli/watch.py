"""`steelyard watch`."""

from __future__ import annotations

import sys
from collections import deque
from pathlib import Path
from typing import Annotated

import typer

from steelyard.cli.options import JsonOption, print_result
from steelyard.core.errors import UserError


def register(root: typer.Typer, name: str, help_: str) -> None:
    """Add the command to the tree."""
    root.command(name)(watch)


def watch(
    run: Annotated[
        str | None,
        typer.Argument(metavar="[RUN|JOBID]", help="The run folder, or a job of it.  [default: the newest run]"),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print the page once and exit.")] = False,
    follow: Annotated[bool, typer.Option("--follow", help="Print a line for each change until the run ends.")] = False,
    folder: Annotated[Path, typer.Option(metavar="DIR", help="Where to look for runs.")] = Path("runs"),
    every: Annotated[float, typer.Option(min=0.2, metavar="SECONDS", help="How often to look.")] = 2.0,
    patience: Annotated[
        float,
        typer.Option(
            min=0.0, metavar="SECONDS", help="How long no step may end before that is wrong; longer where steps are."
        ),
    ] = 60.0,
    json: JsonOption = False,
) -> None:
    """Watch a run: what it does, how far it is, whether something is wrong, and what to do then.

    On a terminal the page renews itself until the run ends; elsewhere it is printed once. Exit codes: 0 healthy or
    completed, 1 something is wrong, 3 not started yet, 4 running with a warning.

    Example: steelyard watch runs/gpt2-small
    """
    from steelyard.observe import find_runs
    from steelyard.observe import terminal as page

    if once and follow:
        raise UserError("--once and --follow are opposites", hint="leave one of them out")
    path = find_runs.find(run, folder)
    if follow and not json:
        raise typer.Exit(page.follow(path, every, patience))
    if follow:
        *_, seen = deque(page.looks(path, every, patience), maxlen=1)
        print_result(seen, json, "")
        raise typer.Exit(seen["exit_code"])
    if once or json or not sys.stdout.isatty():
        seen = page.once(path, patience)
        print_result(seen, json, page.plain(seen))
        raise typer.Exit(seen["exit_code"])
    raise typer.Exit(page.live(path, every, patience))
