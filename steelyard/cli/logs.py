"""`steelyard logs`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from steelyard.cli.cancel import RunArgument
from steelyard.launch import find_runs, launch_record, log_reader


class LogStream(StrEnum):
    """The logs of a node."""

    out = "out"
    err = "err"
    gpu = "gpu"


def logs_(
    run: RunArgument,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Print new lines until the run ends.")] = False,
    node: Annotated[str | None, typer.Option(metavar="HOST", help="Only this node.")] = None,
    stream: Annotated[
        LogStream | None, typer.Option(help="out, err, or gpu: metrics of its devices.  [default: out and err]")
    ] = None,
    lines: Annotated[int, typer.Option(min=0, help="Number of lines from the end of each log.")] = 20,
) -> None:
    """Show the logs of each node and the metrics of its devices.

    Example: steelyard logs runs/my -f --node a1 --stream err
    """
    folder = find_runs.find(run)

    def find() -> list[Path]:
        return log_reader.paths(folder, node, stream.value if stream else None)

    ends = log_reader.sizes(find())
    for path in (path for path, end in ends.items() if end):
        print(f"==> {path.name} <==")
        for line in log_reader.tail(path, lines, ends[path]):
            print(line)
    if empty := [path.name for path, end in ends.items() if not end]:
        print(f"empty: {', '.join(empty)}")
    if follow:
        for path, line in log_reader.follow(find, lambda: launch_record.is_over(folder), ends):
            print(f"{path.name}: {line}", flush=True)
