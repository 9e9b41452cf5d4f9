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
    ValuesChoice,
    print_result,
)
from steelyard.core import units


class Stored(StrEnum):
    """Dtypes of the stored weights."""

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
    allow_dense: Annotated[bool, typer.Option("--allow-dense", help="Keep matrices that are not 2:4 dense.")] = False,
    dtype: Annotated[
        Stored | None, typer.Option(help="[default: the checkpoint's, or bf16 if that is wider]", show_default=False)
    ] = None,
    values: Annotated[
        ValuesChoice | None,
        typer.Option(
            help="8-bit values for 2:4 matrices, with one scale per row (fp8 is e4m3).  [default: as --dtype]",
            show_default=False,
        ),
    ] = None,
    tokenizer: TokenizerOption = None,
    json: JsonOption = False,
) -> None:
    """Export a 2:4 model in compressed form: half of its weights, with a 2-bit index for each.

    The checkpoint already has the zeros, or has masks (--mask, or a run that learned them). generate, eval and bench
    read the output. A 2:4 matrix shrinks to 9/16 of its size in bf16, with --values to 5/16; embeddings and head keep
    --dtype.

    Example: steelyard export-sparse runs/masks compressed

    Example: steelyard export-sparse pruned compressed --values int8
    """
    from steelyard.checkpoint.formats.write import refuse_destination
    from steelyard.sparsity.pruned_source import opened
    from steelyard.sparsity.semi_structured import export
    from steelyard.training.device import DTYPES

    refuse_destination(destination)
    source = opened(checkpoint, mask, base)
    stored = DTYPES[dtype.value] if dtype else None
    result = export(source, destination, stored, allow_dense, tokenizer, values.value if values else None)
    left = f", {result['dense_matrices']} left dense" if result["dense_matrices"] else ""
    text = (
        f"{destination}: {result['compressed']} matrices compressed, {result['values']} values{left}, "
        f"{units.size(result['bytes'])}"
    )
    print_result(result, json, text)
