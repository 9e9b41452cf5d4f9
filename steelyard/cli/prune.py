"""`steelyard prune`."""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from steelyard.cli.options import (
    CheckpointArgument,
    DeviceChoice,
    DeviceOption,
    DtypeChoice,
    DtypeOption,
    JsonOption,
    TokenizerOption,
    print_result,
)
from steelyard.cli.relaunch import NprocOption, launch
from steelyard.core.errors import UserError
from steelyard.parallel.world import detect


class Save(StrEnum):
    """The output."""

    weights = "weights"
    mask = "mask"


def prune(
    checkpoint: CheckpointArgument,
    destination: Annotated[Path, typer.Argument(metavar="OUT", help="The folder or mask file to write.")],
    method: Annotated[str, typer.Option(help="magnitude, wanda, sparsegpt or hessian.")],
    pattern: Annotated[str, typer.Option(help="N:M keeps N of M neighbours; 0.5 prunes half.")] = "2:4",
    calibration: Annotated[
        str | None,
        typer.Option(metavar="FILE|PREFIX", help="Calibration text or token files; magnitude needs none."),
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Number of calibration windows.")] = 128,
    sequence_length: Annotated[
        int | None, typer.Option(min=2, help="Tokens per window.  [default: 4096, or the model's limit]")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Seed for the choice of windows.")] = 0,
    update_weights: Annotated[
        bool | None,
        typer.Option(
            "--update-weights/--no-update-weights",
            help="Update the remaining weights to compensate for the pruned ones.  [default: with sparsegpt]",
        ),
    ] = None,
    save: Annotated[Save, typer.Option(help="A Hugging Face folder with zeros, or only the mask.")] = Save.weights,
    dense_inputs: Annotated[
        bool, typer.Option("--dense-inputs", help="Calibrate each layer on the activations of the dense model.")
    ] = False,
    include: Annotated[
        list[str] | None,
        typer.Option(help="Only these matrices: 0-3, mlp.down, layers.*.attention.*; joined by commas."),
    ] = None,
    exclude: Annotated[list[str] | None, typer.Option(help="All except these matrices.")] = None,
    nproc: NprocOption = None,
    tensor: Annotated[
        int, typer.Option(min=1, help="Ranks that share the matrices; the others share the calibration windows.")
    ] = 1,
    tokenizer: TokenizerOption = None,
    device: DeviceOption = DeviceChoice.auto,
    dtype: DtypeOption = DtypeChoice.auto,
    json: JsonOption = False,
) -> None:
    """Prune a checkpoint in one shot, layer by layer, with one layer in memory at a time.

    If it is killed, the same command continues after the last finished layer.

    Example: steelyard prune models/Llama-3.1-8B pruned --method sparsegpt --calibration c4.jsonl
    Example: steelyard prune models/Llama-3.1-8B pruned --method wanda --calibration c4.jsonl --nproc 8 --tensor 2
    """
    if nproc is not None and nproc % tensor:
        raise UserError(f"{nproc} ranks are not a multiple of --tensor {tensor}", where="--nproc")
    if nproc is not None and nproc > 1:
        raise typer.Exit(launch(nproc))
    from steelyard.sparsity import prune as pruning
    from steelyard.sparsity.prune_request import PruneRequest

    request = PruneRequest(
        checkpoint, destination, method, pattern, update_weights, calibration, samples, sequence_length, seed,
        save.value, dense_inputs, _split(include), _split(exclude), tokenizer, device.value, dtype.value, tensor,
    )  # fmt: skip
    report = pruning.prune(request)
    if detect(os.environ).is_rank0:
        print_result(report, json, pruning.as_text(report))


def refuse_values(values: dict[str, Any]) -> None:
    """Raise for options that contradict each other, without reading anything."""
    from steelyard.sparsity.prune_request import PruneRequest, method_and_update

    given = {"update": values["update_weights"], "calibration": values["calibration"], "save": values["save"].value}
    method_and_update(PruneRequest(values["checkpoint"], values["destination"], values["method"], **given))


def _split(lists: list[str] | None) -> tuple[str, ...]:
    return tuple(word.strip() for words in lists or () for word in words.split(",") if word.strip())
