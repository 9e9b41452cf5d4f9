"""`steelyard doctor`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated

import typer

from steelyard.cli.default_command import with_default
from steelyard.cli.options import JsonOption, print_result
from steelyard.core.errors import UserError
from steelyard.core.host import require_linux


def register(root: typer.Typer, name: str, help_: str) -> None:
    """Add the commands to the tree."""
    with_default(root, name, help_, check, explain)


def check(
    fix: Annotated[bool, typer.Option("--fix", help="Mend what is safe to mend, after showing it.")] = False,
    undo: Annotated[bool, typer.Option("--undo", help="Take back all that --fix and --container did.")] = False,
    container: Annotated[
        str | None,
        typer.Option(metavar="IMAGE", help="Bring into a site profile what this image lacks.", show_default=False),
    ] = None,
    site: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="The site for --container, and for ssh.  [default: the file's]", show_default=False
        ),
    ] = None,
    nodes: Annotated[
        str | None, typer.Option(metavar="A,B", help="Also try ssh, clocks and versions of these.", show_default=False)
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Leave out the all-reduce.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    json: JsonOption = False,
) -> None:
    """Say whether this machine is fit, check by check, and what to do where it is not.

    The word check may be left out. Exits with 1 where a check failed. Example: steelyard doctor --nodes node1,node2
    """
    from steelyard.doctor import diagnose, undo_log
    from steelyard.doctor.machine import here

    require_linux("steelyard doctor", "run it on the machine that will train; steelyard doctor explain works here")
    if sum((fix, undo, container is not None)) > 1:
        raise UserError("--fix, --undo and --container are three different things", hint="choose one")
    machine = here()
    if undo:
        taken, left = undo_log.undo(machine)
        text = "\n".join([f"taken back: {path}" for path in taken] + [f"left as it is: {path}" for path in left])
        print_result({"taken_back": taken, "left": left}, json, text or "there is nothing to take back")
        raise typer.Exit(1 if left else 0)
    agree = _agree(yes)
    if container is not None:
        found: diagnose.Visit | None = diagnose.examine_image(machine, container, site, agree)
    else:
        found = diagnose.examine(machine, nodes, quick, fix, agree, site)
    if found is not None:
        print_result(found.as_result(), json, found.as_text())
        raise typer.Exit(1 if found.verdict == "fail" else 0)


def _agree(yes: bool) -> Callable[[str], bool]:
    """Ask the person, unless told not to; where there is none, nothing is changed."""

    def agree(question: str) -> bool:
        if yes:
            return True
        if not sys.stdin.isatty():
            raise UserError("nobody is here to be asked", hint="look at what would be changed above, then pass --yes")
        return typer.confirm(question, err=True)

    return agree


def explain(
    logs: Annotated[
        list[str],
        typer.Argument(metavar="LOGFILE", help="Logs, a run folder, or - for standard input.", show_default=False),
    ],
    json: JsonOption = False,
) -> None:
    """Find known errors in a log of any size, and say what they mean, what to do, and which are harmless.

    Example: steelyard doctor explain slurm-1234.out
    """
    from steelyard.doctor import explain as explaining

    reported = explaining.explain(logs)
    print_result(explaining.as_result(reported), json, explaining.as_text(reported))
