"""`steelyard report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from steelyard.cli.options import JsonOption, print_result, steps_in


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="The run folder, or several to compare.")],
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            help="The output file.  [default: RUN/report.html; for several runs compare.html]",
            show_default=False,
        ),
    ] = None,
    cluster: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The cluster file, for the prediction.  [default: from the run]"),
    ] = None,
    steps: Annotated[
        str | None, typer.Option(metavar="LIST", help="Steps to show in detail, like 10-12,500 (the end is exclusive).")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Write the report of a run, or a comparison of several, as one HTML file that works offline.

    Example: steelyard report runs/first runs/second -o compared.html
    """  # fmt: skip
    from steelyard.core.run import Run
    from steelyard.observe import report as reports

    if output is None and len(runs) > 1:
        output = Path("compare.html")
    wanted = steps_in(steps, "--steps") if steps is not None else []
    page = reports.write([Run.open(run) for run in runs], output, cluster, wanted)
    print_result({"report": str(page)}, json, str(page))
