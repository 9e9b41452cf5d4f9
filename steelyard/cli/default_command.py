"""Command groups with a default command, whose arguments and options the help of the group also shows."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from steelyard.cli import DEFAULTS, NEED_NO_WORDS


class _Group(TyperGroup):
    """Shows the help of the default command after that of the group."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        super().format_help(ctx, formatter)
        name = DEFAULTS[str(self.name)][0]
        formatter.write_paragraph()
        formatter.write_text(f"The default command is {name}:")
        formatter.write_paragraph()
        default = self.commands[name]
        default.format_help(type(ctx)(default, info_name=ctx.info_name, parent=ctx.parent), formatter)


def with_default(root: typer.Typer, name: str, help_: str, *commands: Any) -> None:
    """Add a group with a default command (`DEFAULTS`) to the tree."""
    group = typer.Typer(help=help_, cls=_Group, rich_markup_mode=None, no_args_is_help=name not in NEED_NO_WORDS)
    for command in commands:
        group.command(command.__name__)(command)
    root.add_typer(group, name=name)
