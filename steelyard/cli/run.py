"""`steelyard run`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from steelyard.cli.options import JsonOption, print_findings


def verify(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    json: JsonOption = False,
) -> None:
    """Verify a run folder: manifest, recipe, records, all checkpoints, and its token files and masks.

    Prints one line per problem and exits with 1, or prints what was checked and what has no checksum.

    Example: steelyard run verify runs/quickstart
    """
    from steelyard.evaluate.verify_run import verify_run

    print_findings(verify_run(run), json)


SUBCOMMANDS = (verify,)
