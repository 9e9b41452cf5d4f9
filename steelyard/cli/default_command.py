"""Groups of commands of which one need not be named: their help tells the arguments and options of that one, too."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from steelyard.cli import DEFAULTS, NEED_NO_WORDS


class _Group(TyperGroup):
    """Who leaves the name out looks for the options where they would stand."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        super().format_help(ctx, formatter)
        name = DEFAULTS[str(self.name)][0]
        formatter.write_paragraph()
        formatter.write_text(f"Without the name of a command it is {name}:")
        formatter.write_paragraph()
        default = self.commands[name]
        default.format_help(type(ctx)(default, info_name=ctx.info_name, parent=ctx.parent), formatter)


def with_default(root: typer.Typer, name: str, help_: str, *commands: Any) -> None:
    """Add a group to the tree that has a default in `DEFAULTS`."""
    group = typer.Typer(help=help_, cls=_Group, rich_markup_mode=None, no_args_is_help=name not in NEED_NO_WORDS)
    for command in commands:
        group.command(command.__name__)(command)
    root.add_typer(group, name=name)
