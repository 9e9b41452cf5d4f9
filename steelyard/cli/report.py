"""`steelyard report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from steelyard.cli.options import JsonOption, print_result


def register(root: typer.Typer, name: str, help_: str) -> None:
    """Add the command to the tree."""
    root.command(name)(report)


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run folder.")],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Where to write it.  [default: RUN/report.html]")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Write a run's report as one HTML file that opens offline.

    Example: steelyard report runs/quickstart -o out.html
    """
    from steelyard.core.run import Run
    from steelyard.observe import report as reports

    page = reports.write(Run.open(run), output)
    print_result({"report": str(page)}, json, str(page))
