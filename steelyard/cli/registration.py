"""Adds the commands of a module of `steelyard.cli` to the command tree."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup

from steelyard.cli import DEFAULTS


class _DefaultGroup(TyperGroup):
    """Shows the help of the default command after that of the group."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        super().format_help(ctx, formatter)
        name = DEFAULTS[str(self.name)][0]
        formatter.write_paragraph()
        formatter.write_text(f"The default command is {name}:")
        formatter.write_paragraph()
        default = self.commands[name]
        default.format_help(type(ctx)(default, info_name=ctx.info_name, parent=ctx.parent), formatter)


def register(root: typer.Typer, name: str, help_: str, module_name: str) -> None:
    """Add the function named like the module, a group of the functions in `SUBCOMMANDS`, or what `register` adds."""
    module = import_module(f"steelyard.cli.{module_name}")
    if hasattr(module, "register"):
        module.register(root, name, help_)
    elif hasattr(module, "SUBCOMMANDS"):
        cls = _DefaultGroup if name in DEFAULTS else None
        group = typer.Typer(help=help_, cls=cls, rich_markup_mode=None, no_args_is_help=True)
        for function in module.SUBCOMMANDS:
            group.command(_command_name(function.__name__))(function)
        root.add_typer(group, name=name)
    else:  # An underscore at the end keeps a function apart from an imported or built-in name.
        root.command(name)(getattr(module, f"{module_name}_", None) or getattr(module, module_name))


def _command_name(function_name: str) -> str:
    return function_name.rstrip("_").replace("_", "-")
