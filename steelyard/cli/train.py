"""`steelyard train`."""

from __future__ import annotations

from typing import Annotated

import typer

from steelyard.cli.options import JsonOption, Overrides, RecipeArgument, RunOption, print_result
from steelyard.core.errors import UserError
from steelyard.core.recipe import Recipe, load


def register(root: typer.Typer, name: str, help_: str) -> None:
    """Add the command to the tree."""
    root.command(name)(train)


def train(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    run: RunOption = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what it would need, and whether it fits.")
    ] = False,
    world: Annotated[
        int | None, typer.Option(min=1, help="Dry run: ranks in all.  [default: as few as the plan needs]")
    ] = None,
    gpu: Annotated[
        str | None, typer.Option(metavar="NAME", help="Dry run: a GPU like h100-80, or its memory like 80GiB.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Train a model as a recipe says, or go on with an unfinished run of it.

    Example: steelyard train my.toml train.steps=50
    """
    if dry_run:
        return _dry_run(load(recipe, overrides or ()), world, gpu, json)
    if world is not None or gpu is not None:
        raise UserError("--world and --gpu belong to a dry run", mend="add --dry-run, or leave them out")
    from steelyard.observe import report
    from steelyard.train import loop

    folder = loop.run(load(recipe, overrides or ()), run)
    page = report.write(folder)
    result = loop.results(folder) | {"report": str(page)}
    print_result(result, json, f"run     {folder.path}\nreport  {page}")


def _dry_run(recipe: Recipe, world: int | None, gpu: str | None, json: bool) -> None:
    from steelyard.train import dry_run

    plan = dry_run.dry_run(recipe, world, gpu)
    print_result(dry_run.as_result(plan), json, dry_run.as_text(plan))
    dry_run.refuse_what_does_not_fit(plan)
