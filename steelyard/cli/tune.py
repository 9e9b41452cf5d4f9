"""`steelyard tune`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from steelyard.cli.options import JsonOption, Overrides, print_result
from steelyard.cli.submit import BACKENDS, SiteOption, SitesOption
from steelyard.core.errors import UserError
from steelyard.core.host import require_linux
from steelyard.tune.command import STORAGE

StorageOption = Annotated[
    str | None,
    typer.Option(metavar="URL", help=f"The study's database, instead of a file in its folder. Also set by {STORAGE}."),
]


def run(
    source: Annotated[str, typer.Argument(metavar="FILE", help="A tune file, or a recipe.", show_default=False)],
    overrides: Overrides = None,
    trials: Annotated[
        int | None, typer.Option(min=1, help="Total number of trials, including earlier sessions.")
    ] = None,
    hours: Annotated[float | None, typer.Option(help="Total hours of trials.")] = None,
    nproc: Annotated[int | None, typer.Option(min=1, metavar="N", help="Ranks of a trial of a recipe.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps of a trial of a recipe.")] = None,
    cluster: Annotated[
        str | None, typer.Option(metavar="FILE", help="The cluster file, for the planner and for submitted jobs.")
    ] = None,
    profile: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE", help="Measured layers from `steelyard plan profile`, for the planner."),
    ] = None,
    on: Annotated[
        str | None,
        typer.Option(metavar=BACKENDS, help="Submit each trial as a job.  [default: run it as a process of the tuner]"),
    ] = None,
    site: SiteOption = None,
    sites_file: SitesOption = None,
    hosts: Annotated[str | None, typer.Option(metavar="A,B", help="mpi: the hosts, starting with that of rank 0.")] = (
        None
    ),
    ranks_per_node: Annotated[int | None, typer.Option(min=1, help="Of submitted jobs.")] = None,
    time: Annotated[
        str | None, typer.Option(metavar="LIMIT", help="slurm: time limit of a trial, like 0:30:00.")
    ] = None,
    study: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The study's folder.  [default: studies/<name>]")
    ] = None,
    storage: StorageOption = None,
    workers: Annotated[int, typer.Option(min=1, help="Number of concurrent trials on this machine.")] = 1,
    worker: Annotated[int | None, typer.Option(hidden=True)] = None,
    json: JsonOption = False,
) -> None:
    """Search for the best settings with trials: short runs of a recipe or of any command.

    The word run is optional. Example: steelyard tune my.toml --trials 30 --nproc 4
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
    """The arguments of this command for a worker, without --workers and --json."""
    others = [word for word in words if not word.startswith("--workers=") and word != "--json"]
    return [word for before, word in zip(["", *others], others, strict=False) if "--workers" not in (before, word)]


def report(
    study: Annotated[Path, typer.Argument(metavar="STUDY", help="The study's folder.")],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="The output file.  [default: STUDY/report.html]")
    ] = None,
    storage: StorageOption = None,
    json: JsonOption = False,
) -> None:
    """Write the report of a study as one HTML file, and its best settings as a recipe.

    Example: steelyard tune report studies/my
    """
    from steelyard.tune import best
    from steelyard.tune import study_report as reports

    if not study.is_dir():
        raise UserError(f"there is no study folder {study}", hint="steelyard tune creates one in studies/")
    url = storage or os.environ.get(STORAGE)
    page = reports.write(study, url, output)
    summary = best.of_folder(study, url)
    print_result(summary | {"report": str(page)}, json, f"{best.as_text(summary)}\nreport {page}")


SUBCOMMANDS = (run, report)
