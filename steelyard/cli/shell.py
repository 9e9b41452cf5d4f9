"""`steelyard shell`."""

from __future__ import annotations

from typing import Annotated

import typer

from steelyard.cli.options import JsonOption, print_result
from steelyard.cli.submit import SiteOption, SitesOption
from steelyard.launch import site_shell, sites


def register(root: typer.Typer, name: str, help_: str) -> None:
    """Add the command to the tree."""
    root.command(name, context_settings={"ignore_unknown_options": True})(shell_)


def shell_(
    command: Annotated[
        list[str] | None, typer.Argument(metavar="[-- COMMAND...]", help="Run this instead of a shell.")
    ] = None,
    site: SiteOption = None,
    sites_file: SitesOption = None,
    reload_container: Annotated[bool, typer.Option("--reload-container", help="Unpack the image again.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print the script.")] = False,
    json: JsonOption = False,
) -> None:
    """Open a shell in a site's container and environment, or run one command there.

    Example: steelyard shell --site campus
    Example: steelyard shell --site campus -- python3 -c 'import torch; print(torch.cuda.is_available())'
    """
    _, settings = sites.find(site, None, sites_file)
    words = command or []
    words = words[1:] if words[:1] == ["--"] else words
    text = site_shell.script_for(settings, words, reload_container)
    if dry_run:
        print_result({"script": text}, json, text)
    else:
        site_shell.enter(text)
