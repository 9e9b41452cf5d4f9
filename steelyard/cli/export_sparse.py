"""`steelyard export-sparse`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from steelyard.cli.options import (
    BaseOption,
    CheckpointArgument,
    JsonOption,
    MaskOption,
    TokenizerOption,
    print_result,
)
from steelyard.core import units


class Stored(StrEnum):
    """What weights may be stored as."""

    bf16 = "bf16"
    fp16 = "fp16"
    fp32 = "fp32"


def register(root: typer.Typer, name: str, help_: str) -> None:
    """Add the command to the tree."""
    root.command(name)(export_sparse)


def export_sparse(
    checkpoint: CheckpointArgument,
    destination: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write.", show_default=False)],
    mask: MaskOption = None,
    base: BaseOption = None,
    allow_dense: Annotated[
        bool, typer.Option("--allow-dense", help="Leave matrices that do not follow 2:4 as they are.")
    ] = False,
    dtype: Annotated[
        Stored | None, typer.Option(help="Left out: the checkpoint's, bf16 if that is wider.", show_default=False)
    ] = None,
    tokenizer: TokenizerOption = None,
    json: JsonOption = False,
) -> None:
    """Write a 2:4 model compressed: half of its weights, and two bits for each that say where they belong.

    The checkpoint has the zeros already, or comes with masks (--mask, or a run that learned them). What is written is
    read by generate, eval and bench, and 9/16 as large where matrices are 2:4.

    Example: steelyard export-sparse runs/masks compressed
    """
    from steelyard.checkpoint.formats.write import refuse_destination
    from steelyard.sparsity.pruned_source import opened
    from steelyard.sparsity.semi_structured import export
    from steelyard.training.device import DTYPES

    refuse_destination(destination)
    source = opened(checkpoint, mask, base)
    result = export(source, destination, DTYPES[dtype.value] if dtype else None, allow_dense, tokenizer)
    left = f", {result['dense_matrices']} left dense" if result["dense_matrices"] else ""
    text = f"{destination}: {result['compressed']} matrices compressed{left}, {units.size(result['bytes'])}"
    print_result(result, json, text)
