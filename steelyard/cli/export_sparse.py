"""`steelyard export-sparse`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from steelyard.cli.options import (
    BaseOption,
    CheckpointArgument,
    DeviceChoice,
    JsonOption,
    MaskOption,
    TokenizerOption,
    ValuesChoice,
    print_result,
)
from steelyard.core import units
from steelyard.core.errors import UserError


class Stored(StrEnum):
    """Dtypes of the stored weights."""

    bf16 = "bf16"
    fp16 = "fp16"
    fp32 = "fp32"


def export_sparse(
    context: typer.Context,
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
    calibration: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|PREFIX",
            help="With --values: round the weights of a row together, for the output on this text or token files.",
        ),
    ] = None,
    samples: Annotated[
        int | None, typer.Option(min=1, help="Number of calibration windows.  [default: 128]", show_default=False)
    ] = None,
    sequence_length: Annotated[
        int | None, typer.Option(min=2, help="Tokens per window.  [default: 4096, or the model's limit]")
    ] = None,
    tokenizer: TokenizerOption = None,
    device: Annotated[
        DeviceChoice | None, typer.Option(help="Device for --calibration.  [default: auto]", show_default=False)
    ] = None,
    json: JsonOption = False,
) -> None:
    """Export a 2:4 model in compressed form: half of its weights, with a 2-bit index for each.

    The checkpoint already has the zeros, or has masks (--mask, or a run that learned them). generate, eval and bench
    read the output. A 2:4 matrix shrinks to 9/16 of its size in bf16, with --values to 5/16; embeddings and head keep
    --dtype.

    Example: steelyard export-sparse runs/masks compressed

    Example: steelyard export-sparse pruned compressed --values int8

    Example: steelyard export-sparse pruned compressed --values fp8 --calibration c4.jsonl
    """
    refuse_values(context.params)
    from steelyard.checkpoint.formats.write import refuse_destination
    from steelyard.sparsity.calibration import Calibration
    from steelyard.sparsity.pruned_source import opened
    from steelyard.sparsity.semi_structured import export
    from steelyard.training.device import DTYPES, device_for

    refuse_destination(destination)
    source = opened(checkpoint, mask, base)
    stored = DTYPES[dtype.value] if dtype else None
    data = None if calibration is None else Calibration(calibration, samples or 128, sequence_length)
    on = device_for((device or DeviceChoice.auto).value)
    result = export(source, destination, stored, allow_dense, tokenizer, values.value if values else None, data, on)
    left = f", {result['dense_matrices']} left dense" if result["dense_matrices"] else ""
    text = (
        f"{destination}: {result['compressed']} matrices compressed, {result['values']} values{left}, "
        f"{units.size(result['bytes'])}"
    )
    print_result(result, json, text)


def refuse_values(values: dict[str, Any]) -> None:
    """Raise for options that contradict each other, without reading anything."""
    if values["calibration"] is not None and values["values"] is None:
        raise UserError("only 8-bit values are calibrated", where="--calibration", hint="add --values int8 or fp8")
    for name in ("samples", "sequence_length", "device"):
        if values[name] is not None and values["calibration"] is None:
            raise UserError("there is no calibration", where=f"--{name.replace('_', '-')}", hint="add --calibration")
