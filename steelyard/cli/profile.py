"""`steelyard profile`: the time and memory of the ranks of a run."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from steelyard.cli.options import JsonOption, Overrides, RecipeArgument, RunOption, print_result, steps_in
from steelyard.cli.relaunch import NprocOption
from steelyard.cli.submit import BACKENDS, SiteOption, SitesOption
from steelyard.core.console import console
from steelyard.core.errors import RuntimeFailure, UserError
from steelyard.core.recipe import load_recipe


class Tool(StrEnum):
    """Profilers."""

    torch = "torch"
    nsys = "nsys"
    ncu = "ncu"
    memory = "memory"


def run(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    tool: Annotated[Tool, typer.Option(help="The profiler; nsys and ncu must be installed.")] = Tool.torch,
    steps: Annotated[
        str, typer.Option(metavar="FIRST-END", help="The steps: 10-12 is 10 and 11, the end is exclusive.")
    ] = "10-12",
    ranks: Annotated[str | None, typer.Option(metavar="LIST", help="The ranks, like 0,4.  [default: all]")] = None,
    on: Annotated[str, typer.Option(metavar=BACKENDS, help="The backend that starts the ranks.")] = "local",
    nproc: NprocOption = None,
    run_: RunOption = None,
    cluster: Annotated[
        Path | None, typer.Option(metavar="CLUSTER.toml", help="mpi and slurm: the node types of the plan.")
    ] = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="mpi and slurm: if the plan has no placement.")] = None,
    hosts: Annotated[str | None, typer.Option(metavar="A,B", help="mpi: the hosts, starting with that of rank 0.")] = (
        None
    ),
    site: SiteOption = None,
    sites_file: SitesOption = None,
    json: JsonOption = False,
) -> None:
    """Train a recipe for a few steps under a profiler, and summarize the traces, which stay in the run folder.

    Example: steelyard profile my.toml --tool torch --steps 10-12 --ranks 0,4 --nproc 8
    """
    from steelyard.launch import backends, sites
    from steelyard.launch.submit import SubmitRequest
    from steelyard.observe import report
    from steelyard.observe.profile import nsight_tools, profile_run

    chosen = _ranks(ranks)
    loaded = profile_run.asked_for(load_recipe(recipe, overrides or ()), tool.value, steps_in(steps, "--steps"), chosen)
    site_name, found = sites.find(site, loaded.site, sites_file)
    request = SubmitRequest(
        on, sites.changed(found, hosts, None), loaded, site_name=site_name, cluster=cluster, nodes=nodes,
        ranks_per_node=nproc,
    )  # fmt: skip
    world = profile_run.refuse_unfit(request, chosen)
    is_remote = backends.load(on).is_remote
    if not is_remote and tool.value in nsight_tools.OUTSIDE:
        nsight_tools.find(tool.value)
    folder = profile_run.prepare(loaded, run_)
    if is_remote:
        profile_run.elsewhere(request, folder)
    else:
        profile_run.here(folder, world)
    seen = profile_run.seen(folder)
    page = report.write(folder)
    print_result(seen.as_result() | {"report": str(page)}, json, f"{seen.as_text()}\nreport  {page}")
    if not seen.profiles:
        raise RuntimeFailure("no trace could be read")


def show(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder with traces.")], json: JsonOption = False
) -> None:
    """Summarize the traces of a run.

    Example: steelyard profile show runs/my-profile
    """
    from steelyard.core.run import Run
    from steelyard.observe.profile import profile_run

    seen = profile_run.seen(Run.open(run))
    print_result(seen.as_result(), json, seen.as_text())
    for problem in seen.problems:
        console.warn(problem)


def _ranks(text: str | None) -> list[int]:
    if text is None:
        return []
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) < 8 for part in parts):
        raise UserError(f"--ranks: {text or 'an empty value'} is not a list of ranks", hint="use a form like 0,4")
    return sorted({int(part) for part in parts})


SUBCOMMANDS = (run, show)
