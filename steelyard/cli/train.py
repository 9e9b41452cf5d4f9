"""`steelyard train`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from steelyard.cli.options import JsonOption, Overrides, RecipeArgument, RunOption, print_result
from steelyard.cli.relaunch import NprocOption, launch
from steelyard.core.console import console
from steelyard.core.errors import UserError
from steelyard.core.recipe import Recipe, load_recipe
from steelyard.parallel.world import detect, raise_on_all_ranks

ResumeOption = Annotated[
    str,
    typer.Option(
        metavar="HOW", help="auto: resume an unfinished run. never: start a new run. Or a checkpoint to resume from."
    ),
]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Only print the memory needed and whether it fits.")]
WorldOption = Annotated[
    int | None, typer.Option(min=1, help="Dry run: world size.  [default: the smallest for the plan]")
]
GpuOption = Annotated[
    str | None, typer.Option(metavar="NAME", help="Dry run: a GPU like h100-80, or its memory like 80GiB.")
]
MeasuredOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Dry run: compare with ranks from `steelyard plan measure`.")
]


def train(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    run: RunOption = None,
    nproc: NprocOption = None,
    resume: ResumeOption = "auto",
    dry_run: DryRunOption = False,
    world: WorldOption = None,
    gpu: GpuOption = None,
    measured: MeasuredOption = None,
    json: JsonOption = False,
) -> None:
    """Train a model from a recipe, or resume an unfinished run of it.

    Example: steelyard train my.toml train.steps=50 --nproc 4
    """
    ranks = detect(os.environ)
    with raise_on_all_ranks(ranks):
        loaded = load_recipe(recipe, overrides or ())
    if dry_run or world is not None or gpu is not None or measured is not None:
        return print_dry_run(loaded, dry_run, world, gpu, json, measured)
    if nproc is not None and nproc > 1:
        loaded.parallel.data_for(nproc)
        raise typer.Exit(launch(nproc))
    from steelyard.observe.profile import nsight_tools

    with raise_on_all_ranks(ranks):
        nsight_tools.go_under(loaded, run, ranks.rank)
    from steelyard.observe import report
    from steelyard.sparsity import sparsity_extension
    from steelyard.training import run_status, trainer

    with raise_on_all_ranks(ranks):
        extension = sparsity_extension.extension(loaded)
    folder = trainer.run(loaded, run, extension, resume)
    if ranks.is_rank0:
        try:
            page = str(report.write(folder)) if loaded.log.report else None
        except UserError as missing:  # The training itself succeeded.
            page = None
            console.warn(f"no report: {missing.message}")
        result = run_status.results(folder) | {"report": page}
        print_result(result, json, f"run     {folder.path}" + (f"\nreport  {page}" if page else ""))


def print_dry_run(
    recipe: Recipe, dry_run: bool, world: int | None, gpu: str | None, json: bool, measured: Path | None = None
) -> None:
    """Print the predicted memory; an error if it does not fit, or if the other options are given without --dry-run."""
    if not dry_run:
        raise UserError("--world, --gpu and --measured belong to a dry run", hint="add --dry-run, or remove them")
    from steelyard.planning import measured_ranks
    from steelyard.training import dry_run as prediction

    plan = prediction.dry_run(recipe, world, gpu)
    result, text = prediction.as_result(plan), prediction.as_text(plan)
    if measured is not None:
        result["measured"] = measured_ranks.memory_check(measured, recipe, plan.world)
        text += "\n\n" + measured_ranks.memory_text(result["measured"])
    print_result(result, json, text)
    prediction.refuse_what_does_not_fit(plan)
