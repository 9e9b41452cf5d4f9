"""`steelyard init`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from steelyard.cli.options import JsonOption, print_result


class InitTask(StrEnum):
    """What the recipe is for."""

    pretrain = "pretrain"
    sft = "sft"
    prune = "prune"


def init(
    data: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="Text: a file, a pattern or a folder.  [default: data, or this folder]"),
    ] = None,
    task: Annotated[
        InitTask | None, typer.Option(help="The task.  [default: sft for conversations, else pretrain]")
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="CKPT", help="sft and prune: the model to start from.", show_default=False)
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="The recipe to write.  [default: TASK.toml]")] = None,
    hours: Annotated[float, typer.Option(min=0.0, help="pretrain: training time for which the model is sized.")] = 1.0,
    json: JsonOption = False,
) -> None:
    """Write a recipe that fits this text and this machine, and print the next three commands.

    A new model gets the size that the text and the hours allow: about 20 tokens per parameter, up to four epochs.

    Example: steelyard init --data corpus.txt
    Example: steelyard init --task sft --data talks.jsonl --model HuggingFaceTB/SmolLM2-135M
    """
    from steelyard.tune import init_run

    made = init_run.init(data, None if task is None else task.value, model, out, hours)
    lines = [*made["reasons"], f"recipe   {made['recipe']}", "", "next:", *(f"  {line}" for line in made["commands"])]
    print_result(made, json, "\n".join(lines))
