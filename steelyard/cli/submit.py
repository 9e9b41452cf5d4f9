"""`steelyard submit`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from steelyard.cli import command_words
from steelyard.cli.options import JsonOption, RunOption, print_result
from steelyard.core.errors import UserError
from steelyard.core.recipe import load_recipe
from steelyard.launch import backends, sites
from steelyard.launch.submit import (
    SubmitRequest,
    array_requests,
    preview,
    preview_array,
    submit,
    submit_array,
    wait,
)

BACKENDS = f"[{'|'.join(backends.names())}]"
Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="RECIPE [SECTION.KEY=VALUE]... | -- COMMAND...",
        help="A recipe to train, or another steelyard command after --.",
        show_default=False,
    ),
]
SiteOption = Annotated[
    str | None, typer.Option("--site", metavar="NAME", help="A site of sites.toml.  [default: the file's default]")
]
SitesOption = Annotated[
    Path | None, typer.Option("--sites", metavar="FILE", help="[default: ~/.config/steelyard/sites.toml]")
]


def submit_(
    words: Words = None,
    on: Annotated[str, typer.Option(metavar=BACKENDS, help="The backend that starts the ranks.")] = "local",
    site: SiteOption = None,
    sites_file: SitesOption = None,
    cluster: Annotated[
        Path | None, typer.Option(metavar="CLUSTER.toml", help="The node types of the plan: partition, gres, GPUs.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="The name of the job.  [default: the recipe's name]")] = None,
    run: RunOption = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="If the plan has no placement.")] = None,
    ranks_per_node: Annotated[int | None, typer.Option(min=1, help="If the plan has no placement.")] = None,
    min_nodes: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Elastic: after the loss of a node, replan for those that remain and continue with at least N.",
        ),
    ] = None,
    hosts: Annotated[str | None, typer.Option(metavar="A,B", help="mpi: the hosts, starting with that of rank 0.")] = (
        None
    ),
    time: Annotated[str | None, typer.Option(metavar="LIMIT", help="slurm: time limit, like 24:00:00.")] = None,
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="Rendezvous port.  [default: a free one]")] = None,
    job: Annotated[
        str | None, typer.Option(metavar="ID", help="slurm: run in this allocation instead of a new one.")
    ] = None,
    array: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=[..]", help="slurm: one job per value; several options give all combinations."),
    ] = None,
    reload_container: Annotated[
        bool, typer.Option("--reload-container", help="Unpack the image again on each node.")
    ] = False,
    skip_checks: Annotated[
        bool, typer.Option("--skip-checks", help="Submit without checks of token files, checkpoints and memory.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print the job script or command.")] = False,
    wait_: Annotated[bool, typer.Option("--wait", help="Wait until the job ends, and exit with 1 if it failed.")] = (
        False
    ),
    json: JsonOption = False,
) -> None:
    """Run a recipe or any command on this machine, with mpirun or on Slurm. The plan determines nodes and ranks.

    Example: steelyard submit my.toml --on slurm --cluster cluster.toml --time 24:00:00
    Example: steelyard submit my.toml --on slurm --cluster cluster.toml --min-nodes 2
    Example: steelyard submit --on slurm --ranks-per-node 4 -- eval ppl runs/my --data wikitext2
    """
    recipe, command = _split(words or [])
    parsed = command_words.parsed(command) if command else None
    if parsed is not None:
        parsed.refuse_ranks((nodes or 1) * (ranks_per_node or 1))
    if hosts is not None:
        backends.refuse_option(on, backends.Option.HOSTS, ", or remove --hosts")
    loaded = load_recipe(recipe[0], recipe[1:]) if recipe else None
    site_name, found = sites.find(site, loaded.site if loaded else None, sites_file)
    request = SubmitRequest(
        on, sites.changed(found, hosts, port), loaded, command, name, run, site_name, cluster, nodes,
        ranks_per_node, time, job, reload_container, skip_checks, parsed is not None and parsed.uses_gpu, min_nodes,
    )  # fmt: skip
    if array:
        requests = array_requests(request, array, lambda overrides: load_recipe(recipe[0], [*recipe[1:], *overrides]))
        if dry_run:
            result, text = preview_array(requests)
            print_result(result, json, text)
            return
        results = submit_array(requests)
        text = "\n".join(f"{', '.join(each['jobs'])}  {each['run']}" for each in results)
        print_result({"runs": results}, json, text)
        if wait_:
            raise typer.Exit(max([wait(Path(each["run"])) for each in results]))
    elif dry_run:
        result, text = preview(request)
        print_result(result, json, text)
    else:
        result = submit(request)
        print_result(result, json, f"run  {result['run']}\njob  {', '.join(result['jobs'])}  {result['state']}")
        if wait_:
            raise typer.Exit(wait(Path(result["run"])))


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    """A recipe with its overrides, or the words of another command after `--`."""
    before, after = (words, []) if "--" not in words else (words[: words.index("--")], words[words.index("--") + 1 :])
    if bool(before) == bool(after):
        raise UserError("give a recipe, or a command after --", hint="steelyard submit my.toml --on slurm")
    return before, after
