"""`steelyard run`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from steelyard.cli.options import JsonOption, print_findings


def register(root: typer.Typer, name: str, help_: str) -> None:
    """Add the commands to the tree."""
    group = typer.Typer(help=help_, rich_markup_mode=None, no_args_is_help=True)
    group.callback()(_group)
    group.command("verify")(verify)
    root.add_typer(group, name=name)


def _group() -> None:
    """Keep the name of the only command."""


def verify(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    json: JsonOption = False,
) -> None:
    """Check a run folder: manifest, recipe, records, all checkpoints, and the token files and masks it names.

    Prints a line for each problem and exits with 1, or says what was checked and what has no checksum.

    Example: steelyard run verify runs/quickstart
    """
    from steelyard.evaluate.verify_run import verify_run

    print_findings(verify_run(run), json)
