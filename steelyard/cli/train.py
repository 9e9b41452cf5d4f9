"""`steelyard train`."""

from __future__ import annotations

import typer

from steelyard.cli.options import JsonOption, Overrides, RecipeArgument, RunOption, print_result
from steelyard.core.recipe import load


def register(root: typer.Typer, name: str, help_: str) -> None:
    """Add the command to the tree."""
    root.command(name)(train)


def train(recipe: RecipeArgument, overrides: Overrides = None, run: RunOption = None, json: JsonOption = False) -> None:
    """Train a model as a recipe says, or go on with an unfinished run of it.

    Example: steelyard train my.toml train.steps=50
    """
    from steelyard.observe import report
    from steelyard.train import loop

    folder = loop.run(load(recipe, overrides or ()), run)
    page = report.write(folder)
    result = loop.results(folder) | {"report": str(page)}
    print_result(result, json, f"run     {folder.path}\nreport  {page}")
