"""`steelyard train`."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from steelyard.cli.options import JsonOption, Overrides, RecipeArgument, RunOption, print_result
from steelyard.core.errors import UserError
from steelyard.core.recipe import Recipe, load
from steelyard.launch import local
from steelyard.parallel.world import alike, detect

NprocOption = Annotated[
    int | None, typer.Option("--nproc", min=1, metavar="N", help="Train with N ranks on this machine.")
]


def register(root: typer.Typer, name: str, help_: str) -> None:
    """Add the command to the tree."""
    root.command(name)(train)


def train(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    run: RunOption = None,
    nproc: NprocOption = None,
    json: JsonOption = False,
) -> None:
    """Train a model as a recipe says, or go on with an unfinished run of it.

    Example: steelyard train my.toml train.steps=50 --nproc 4
    """
    with alike(detect(os.environ)):
        loaded = load(recipe, overrides or ())
    if nproc is not None and nproc > 1:
        raise typer.Exit(_launch(loaded, nproc))
    from steelyard.observe import report
    from steelyard.train import loop

    folder = loop.run(loaded, run)
    page = report.write(folder)
    result = loop.results(folder) | {"report": str(page)}
    print_result(result, json, f"run     {folder.path}\nreport  {page}")


def _launch(recipe: Recipe, nproc: int) -> int:
    """The same command again, as so many ranks."""
    world = detect(os.environ)
    if world.size > 1:
        raise UserError(
            f"--nproc {nproc} starts ranks, and {world.launcher} has already started {world.size}",
            mend="drop --nproc, or start a single process",
        )
    recipe.parallel.data_for(nproc)
    return local.run([sys.executable, *_without(sys.orig_argv[1:], "--nproc")], nproc)


def _without(words: list[str], option: str) -> list[str]:
    kept = [word for word in words if not word.startswith(f"{option}=")]
    return [word for before, word in zip(["", *kept], kept, strict=False) if option not in (before, word)]
