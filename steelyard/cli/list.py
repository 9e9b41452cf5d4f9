"""`steelyard list`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from steelyard.cli.options import JsonOption, print_result
from steelyard.launch import run_list


def list_(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder of the runs.")] = Path("runs"),
    json: JsonOption = False,
) -> None:
    """List the runs in a folder and their states.

    Example: steelyard list
    """
    rows = run_list.rows(folder)
    print_result({"runs": rows}, json, run_list.as_text(rows, folder))
