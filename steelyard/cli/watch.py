"""`steelyard watch`."""

from __future__ import annotations

import sys
from collections import deque
from pathlib import Path
from typing import Annotated

import typer

from steelyard.cli.options import JsonOption, print_result
from steelyard.core.errors import UserError


def watch(
    run: Annotated[
        str | None,
        typer.Argument(metavar="[RUN|JOBID]", help="A run folder, or the id of its job.  [default: the newest run]"),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print the status once and exit.")] = False,
    follow: Annotated[bool, typer.Option("--follow", help="Print a line for each change until the run ends.")] = False,
    folder: Annotated[Path, typer.Option(metavar="DIR", help="The folder of the runs.")] = Path("runs"),
    every: Annotated[float, typer.Option(min=0.2, metavar="SECONDS", help="Polling interval.")] = 2.0,
    patience: Annotated[
        float,
        typer.Option(
            min=0.0, metavar="SECONDS", help="Report a hang after this time without a step; longer for slow steps."
        ),
    ] = 60.0,
    notify: Annotated[
        bool, typer.Option("--notify", help="Call log.on_verdict of the run's recipe when the verdict changes.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Monitor a run: its state, its progress, problems, and what to do about them.

    On a terminal the status is refreshed until the run ends; otherwise it is printed once. Exit codes: 0 healthy or
    completed, 1 something is wrong, 3 not started yet, 4 running with a warning.

    Example: steelyard watch runs/gpt2-small
    """
    from steelyard.launch import find_runs
    from steelyard.observe import terminal as page

    if once and follow:
        raise UserError("--once and --follow cannot be combined", hint="remove one of them")
    options = page.WatchOptions(find_runs.find(run, folder), every, patience, notify)
    if follow and not json:
        raise typer.Exit(page.follow(options))
    if follow:
        *_, seen = deque(page.views(options), maxlen=1)
        print_result(seen, json, "")
        raise typer.Exit(seen["exit_code"])
    if once or json or not sys.stdout.isatty():
        seen = page.once(options)
        print_result(seen, json, page.plain(seen))
        raise typer.Exit(seen["exit_code"])
    raise typer.Exit(page.live(options))
