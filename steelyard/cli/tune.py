"""`steelyard tune`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from steelyard.cli.groups import with_default
from steelyard.cli.options import JsonOption, Overrides, print_result
from steelyard.core.errors import UserError
from steelyard.tune.command import STORAGE

StorageOption = Annotated[
    str | None,
    typer.Option(metavar="URL", help=f"The study's database, instead of a file in its folder. Also {STORAGE}."),
]


def register(root: typer.Typer, name: str, help_: str) -> None:
    """Add the commands to the tree."""
    with_default(root, name, help_, run, report)


def run(
    source: Annotated[str, typer.Argument(metavar="FILE", help="A tune file, or a recipe.", show_default=False)],
    overrides: Overrides = None,
    trials: Annotated[int | None, typer.Option(min=1, help="Trials in all, those of earlier sessions too.")] = None,
    hours: Annotated[float | None, typer.Option(help="Hours in which trials run, in all.")] = None,
    nproc: Annotated[int | None, typer.Option(min=1, metavar="N", help="Ranks of a recipe's trial.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps of a recipe's trial.")] = None,
    cluster: Annotated[str | None, typer.Option(metavar="FILE", help="The machines, for the planner.")] = None,
    study: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The study's folder.  [default: studies/<name>]")
    ] = None,
    storage: StorageOption = None,
    workers: Annotated[int, typer.Option(min=1, help="Trials side by side on this machine.")] = 1,
    worker: Annotated[int | None, typer.Option(hidden=True)] = None,
    json: JsonOption = False,
) -> None:
    """Search the best settings by trials: short real runs of a recipe, or of any command.

    The word run may be left out. Example: steelyard tune my.toml --trials 30 --nproc 4
    """
    from steelyard.tune import best, search, spec
    from steelyard.tune import workers as crews
    from steelyard.tune.defaults import tune_for

    given = {"budget.trials": trials, "budget.hours": hours, "trial.steps": steps, "cluster": cluster}
    changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if spec.is_tune_file(source):
        if overrides:
            changes["overrides"] = overrides
        if nproc is not None:
            changes["nproc"] = nproc
        tune = spec.load(source, changes)
    else:
        tune = tune_for(source, overrides or (), nproc or 1, changes)
    folder, url = study or Path("studies") / tune.name, storage or os.environ.get(STORAGE)
    search.prepare(tune)
    if workers > 1 and worker is None:
        crews.run(_same(sys.argv[1:]), workers)
        summary = best.of_folder(folder, url)
    else:
        summary = search.search(tune, folder, url, worker or 0)
        if worker is not None:
            return
    print_result(summary, json, best.as_text(summary))


def _same(words: list[str]) -> list[str]:
    """The words of this command for a worker: without how many there are."""
    kept = [word for word in words if not word.startswith("--workers=") and word != "--json"]
    return [word for before, word in zip(["", *kept], kept, strict=False) if "--workers" not in (before, word)]


def report(
    study: Annotated[Path, typer.Argument(metavar="STUDY", help="The study's folder.")],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Where to write it.  [default: STUDY/report.html]")
    ] = None,
    storage: StorageOption = None,
    json: JsonOption = False,
) -> None:
    """Write what a study found as one HTML file, and its best settings as a recipe.

    Example: steelyard tune report studies/my
    """
    from steelyard.tune import best
    from steelyard.tune import report as reports

    if not study.is_dir():
        raise UserError(f"there is no study folder {study}", mend="steelyard tune makes one under studies/")
    url = storage or os.environ.get(STORAGE)
    page = reports.write(study, url, output)
    summary = best.of_folder(study, url)
    print_result(summary | {"report": str(page)}, json, f"{best.as_text(summary)}\nreport {page}")
