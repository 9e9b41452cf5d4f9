"""`steelyard serve`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def serve(
    folder: Annotated[Path, typer.Argument(metavar="[DIR]", help="The folder of the runs.")] = Path("runs"),
    host: Annotated[
        str, typer.Option(help="The address to listen on; everyone who can reach it can read.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port; 0 selects a free one.")] = 8327,
) -> None:
    """Show all runs in a folder in a browser, live and read-only.

    Example: steelyard serve runs
    """
    from steelyard.observe import web_server as server

    server.serve(folder, host, port)
