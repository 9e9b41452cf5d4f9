"""`steelyard site`: describe a cluster as a site, and test it."""

from __future__ import annotations

from typing import Annotated

import typer

from steelyard.cli.options import JsonOption, print_result
from steelyard.cli.submit import SitesOption


def init(
    name: Annotated[
        str | None, typer.Option(help="The name of the site.  [default: that of the cluster]", show_default=False)
    ] = None,
    partition: Annotated[
        str | None, typer.Option(help="The partition.  [default: one with GPUs]", show_default=False)
    ] = None,
    account: Annotated[str | None, typer.Option(help="The account.  [default: yours]", show_default=False)] = None,
    image: Annotated[
        str | None, typer.Option(metavar="IMAGE", help="Run in this container image.", show_default=False)
    ] = None,
    gpus: Annotated[bool, typer.Option("--gpus/--no-gpus", help="Ask for the GPUs of the nodes.")] = True,
    test: Annotated[bool, typer.Option("--test/--no-test", help="Submit a short test job.")] = True,
    wait: Annotated[float, typer.Option(min=0.0, metavar="MINUTES", help="Wait this long for the test job.")] = 10.0,
    sites_file: SitesOption = None,
    json: JsonOption = False,
) -> None:
    """Describe this Slurm cluster in sites.toml, and submit a short test job with it.

    Detects partitions, GPUs, your account, loaded modules and container runtimes. Other sites in the file stay. Exits
    with 1 if the test job fails.

    Example: steelyard site init --image /images/steelyard.sif
    """
    from dataclasses import replace

    from steelyard.core.console import console
    from steelyard.launch import site_test, sites
    from steelyard.launch.backends import slurm_site

    facts = slurm_site.detect()
    facts = facts if account is None else replace(facts, account=account)
    for line in facts.lines():
        console.say(line)
    name = name or facts.cluster
    values = slurm_site.settings(facts, slurm_site.chosen(facts.partitions, partition, gpus), image, gpus)
    path = slurm_site.add_site(sites_file, name, values)
    result = {"site": name, "file": str(path), "settings": values}
    text = f"site      {name} in {path}"
    if test:
        result["test"] = verdict = site_test.try_site(name, sites.find(name, None, path)[1], 60 * wait)
        hint = f"\n  hint: {verdict['hint']}" if verdict.get("hint") else ""
        text += f"\ntest job  {verdict['verdict']}{hint}"
    text += f"\nnext      steelyard submit RECIPE --on slurm --site {name}"
    print_result(result, json, text)
    if test and verdict["works"] is False:
        raise typer.Exit(1)


def check(
    gpus: Annotated[
        int | None, typer.Option(min=0, help="The number of GPUs that must compute.", show_default=False)
    ] = None,
    json: JsonOption = False,
) -> None:
    """Check that torch works on this node and that its GPUs compute. The test job of site init runs this.

    Example: steelyard site check --gpus 4
    """
    from steelyard.training.node_check import check_node

    facts = check_node(gpus)
    hint = f"\n  hint: {facts['hint']}" if facts.get("hint") else ""
    print_result(facts, json, f"{facts['host']}: {facts['verdict']}{hint}")
    if not facts["works"]:
        raise typer.Exit(1)


SUBCOMMANDS = (init, check)
