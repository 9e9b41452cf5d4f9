"""`steelyard cancel`."""

from __future__ import annotations

from typing import Annotated

import typer

from steelyard.cli.options import JsonOption, print_result
from steelyard.launch import find_runs
from steelyard.launch.submit import cancel_run

RunArgument = Annotated[str, typer.Argument(metavar="RUN|JOB", help="A run folder, a name in runs/, or a job id.")]


def cancel(
    run: RunArgument,
    now: Annotated[bool, typer.Option("--now", help="Kill it without saving.")] = False,
    json: JsonOption = False,
) -> None:
    """Cancel a submitted job. Its ranks save a checkpoint and stop.

    Example: steelyard cancel runs/my
    """
    result = cancel_run(find_runs.find(run), at_once=now)
    verb = "cancelled" if result["cancelled"] else "had already ended"
    print_result(result, json, f"{result['run']}  job {', '.join(result['jobs'])} {verb}: {result['state']}")
