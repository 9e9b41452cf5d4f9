"""`steelyard doctor`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated

import typer

from steelyard.cli.options import JsonOption, print_result
from steelyard.core.errors import UserError
from steelyard.core.host import require_linux


def check(
    fix: Annotated[bool, typer.Option("--fix", help="Apply safe fixes, after showing them.")] = False,
    undo: Annotated[bool, typer.Option("--undo", help="Undo all changes of --fix and --container.")] = False,
    container: Annotated[
        str | None,
        typer.Option(metavar="IMAGE", help="Add what this image lacks to a site profile.", show_default=False),
    ] = None,
    site: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="The site for --container and ssh.  [default: the file's default]", show_default=False
        ),
    ] = None,
    nodes: Annotated[
        str | None,
        typer.Option(metavar="A,B", help="Also check ssh, clocks and versions of these nodes.", show_default=False),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Skip the all-reduce.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
    json: JsonOption = False,
) -> None:
    """Check whether this machine can train, with a hint for each failed check.

    The word check is optional. Exits with 1 if a check failed. Example: steelyard doctor --nodes node1,node2
    """
    from steelyard.doctor import diagnose, undo_log
    from steelyard.doctor.machine import here

    require_linux("steelyard doctor", "run it on the machine that will train; steelyard doctor explain works here")
    if sum((fix, undo, container is not None)) > 1:
        raise UserError("--fix, --undo and --container cannot be combined", hint="choose one")
    machine = here()
    if undo:
        taken, left = undo_log.undo(machine)
        text = "\n".join([f"undone: {path}" for path in taken] + [f"unchanged: {path}" for path in left])
        print_result({"taken_back": taken, "left": left}, json, text or "there is nothing to undo")
        raise typer.Exit(1 if left else 0)
    confirm = _confirm(yes)
    if container is not None:
        diagnosis: diagnose.Diagnosis | None = diagnose.examine_image(machine, container, site, confirm)
    else:
        diagnosis = diagnose.examine(machine, nodes, quick, fix, confirm, site)
    if diagnosis is not None:
        print_result(diagnosis.as_result(), json, diagnosis.as_text())
        raise typer.Exit(1 if diagnosis.verdict == "fail" else 0)


def _confirm(yes: bool) -> Callable[[str], bool]:
    """A function that asks for confirmation, unless `yes`; without a terminal it raises, so nothing is changed."""

    def confirm(question: str) -> bool:
        if yes:
            return True
        if not sys.stdin.isatty():
            raise UserError(
                "there is no terminal to ask for confirmation", hint="check the changes above, then pass --yes"
            )
        return typer.confirm(question, err=True)

    return confirm


def explain(
    logs: Annotated[
        list[str],
        typer.Argument(metavar="LOGFILE", help="Logs, a run folder, or - for standard input.", show_default=False),
    ],
    json: JsonOption = False,
) -> None:
    """Find known errors in a log of any size, with their meaning, what to do, and which are harmless.

    Example: steelyard doctor explain slurm-1234.out
    """
    from steelyard.doctor import explain as explaining

    explanation = explaining.explain(logs)
    print_result(explaining.as_result(explanation), json, explaining.as_text(explanation))


SUBCOMMANDS = (check, explain)
