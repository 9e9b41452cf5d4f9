"""`steelyard adapter`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from steelyard.cli.options import JsonOption, print_result


def merge(
    base: Annotated[str, typer.Argument(metavar="BASE", help="The base model of the adapter.")],
    adapter: Annotated[str, typer.Argument(metavar="ADAPTER", help="A folder in PEFT's format, or a run.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The Hugging Face folder to write.")],
    json: JsonOption = False,
) -> None:
    """Merge an adapter into the weights of its base model.

    Example: steelyard adapter merge models/base runs/tuned models/merged
    """
    from steelyard.finetuning import peft_format

    result = peft_format.merge(base, adapter, out)
    print_result(result, json, f"{out}: {result['adapted']} matrices adapted")


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run that trained an adapter.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write.")],
    json: JsonOption = False,
) -> None:
    """Export the adapter of a run in PEFT's format.

    Example: steelyard adapter export runs/tuned adapters/tuned
    """
    from steelyard.finetuning import peft_format

    result = peft_format.export(run, out)
    print_result(result, json, f"{out}: {result['adapted']} matrices")


SUBCOMMANDS = (merge, export)
