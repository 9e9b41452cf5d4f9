"""`steelyard serve`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def register(root: typer.Typer, name: str, help_: str) -> None:
    """Add the command to the tree."""
    root.command(name)(serve)


def serve(
    folder: Annotated[Path, typer.Argument(metavar="[DIR]", help="The folder whose runs to show.")] = Path("runs"),
    host: Annotated[str, typer.Option(help="The address to listen on; anyone who reaches it can read.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port; 0 takes a free one.")] = 8327,
) -> None:
    """Show all runs below a folder in a browser, live. Nothing can be changed from there.

    Example: steelyard serve runs
    """
    from steelyard.observe import web_server as server

    server.serve(folder, host, port)
