"""`steelyard tune`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from steelyard.cli.default_command import with_default
from steelyard.cli.options import JsonOption, Overrides, print_result
from steelyard.cli.submit import BACKENDS, SiteOption, SitesOption
from steelyard.core.errors import UserError
from steelyard.core.host import require_linux
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
    cluster: Annotated[
        str | None, typer.Option(metavar="FILE", help="The machines, for the planner and for jobs that are submitted.")
    ] = None,
    profile: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE", help="Measured layers, for the planner: `steelyard plan profile`."),
    ] = None,
    on: Annotated[
        str | None,
        typer.Option(metavar=BACKENDS, help="Submit each trial as a job.  [default: run it under the tuner, here]"),
    ] = None,
    site: SiteOption = None,
    sites_file: SitesOption = None,
    hosts: Annotated[str | None, typer.Option(metavar="A,B", help="mpi: the hosts, the one of rank 0 first.")] = None,
    ranks_per_node: Annotated[int | None, typer.Option(min=1, help="Of jobs that are submitted.")] = None,
    time: Annotated[
        str | None, typer.Option(metavar="LIMIT", help="slurm: time limit of a trial's job, like 0:30:00.")
    ] = None,
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
    Example: steelyard tune my.toml --on slurm --cluster cluster.toml --nproc 16 --workers 4
    """
    from steelyard.tune import best, spec, worker_loop
    from steelyard.tune import local_workers as crews
    from steelyard.tune.defaults import tune_for

    require_linux("steelyard tune", "tune on the machine that will train; steelyard tune report works here")
    given = {
        "budget.trials": trials, "budget.hours": hours, "trial.steps": steps, "cluster": cluster,
        "profile": profile or None, "launch.on": on, "launch.site": site, "launch.time": time,
        "launch.sites": str(sites_file) if sites_file else None, "launch.ranks_per_node": ranks_per_node,
        "launch.hosts": [host.strip() for host in hosts.split(",")] if hosts is not None else None,
    }  # fmt: skip
    changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if spec.is_tune_file(source):
        if overrides:
            changes["overrides"] = overrides
        if nproc is not None:
            changes["nproc"] = nproc
        tune = spec.load(source, changes)
    else:
        tune = tune_for(source, overrides or (), nproc, changes)
    folder, url = study or Path("studies") / tune.name, storage or os.environ.get(STORAGE)
    worker_loop.prepare(tune)
    if worker is None:
        worker_loop.check_files(tune)
    if workers > 1 and worker is None:
        worker_loop.opened(tune, folder, url)
        crews.run(_same(sys.argv[1:]), workers, tune.launch.on)
        summary = best.of_folder(folder, url)
    else:
        summary = worker_loop.search(tune, folder, url, worker or 0)
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
    from steelyard.tune import study_report as reports

    if not study.is_dir():
        raise UserError(f"there is no study folder {study}", hint="steelyard tune makes one under studies/")
    url = storage or os.environ.get(STORAGE)
    page = reports.write(study, url, output)
    summary = best.of_folder(study, url)
    print_result(summary | {"report": str(page)}, json, f"{best.as_text(summary)}\nreport {page}")
