"""`steelyard eval`: perplexity and tasks."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from steelyard.cli.options import (
    AllowUnknownOption,
    BaseOption,
    CheckpointArgument,
    DeviceChoice,
    DeviceOption,
    DtypeChoice,
    DtypeOption,
    JsonOption,
    MaskOption,
    TokenizerOption,
    print_result,
)
from steelyard.cli.relaunch import NprocOption, launch
from steelyard.core.errors import UserError


class ProtocolName(StrEnum):
    """Whose windows and normalization are used."""

    hf = "hf"
    megatron = "megatron"


def ppl(
    checkpoint: CheckpointArgument,
    data: Annotated[
        str, typer.Option(help="A .txt, .jsonl or .parquet, wikitext2, wikitext103 (raw test splits), or token files.")
    ],
    sequence_length: Annotated[
        int | None, typer.Option(min=2, help="Tokens per window.  [default: 4096, or the model's limit]")
    ] = None,
    stride: Annotated[
        int | None, typer.Option(min=1, help="Tokens from window to window.  [default: a window]")
    ] = None,
    protocol: Annotated[ProtocolName, typer.Option(help="Whose windows and normalization.")] = ProtocolName.hf,
    nproc: NprocOption = None,
    tensor: Annotated[int, typer.Option(min=1, help="Tensor-parallel size.")] = 1,
    tokenizer: TokenizerOption = None,
    mask: MaskOption = None,
    base: BaseOption = None,
    device: DeviceOption = DeviceChoice.auto,
    dtype: DtypeOption = DtypeChoice.auto,
    allow_unknown: AllowUnknownOption = False,
    json: JsonOption = False,
) -> None:
    """Measure the perplexity of a model on a text, and print how it was computed.

    Example: steelyard eval ppl runs/mine --data wikitext2 --sequence-length 4096
    """
    if nproc is not None and nproc % tensor:
        raise UserError(f"{nproc} ranks are not a multiple of --tensor {tensor}", where="--nproc")
    if nproc is not None and nproc > 1:
        raise typer.Exit(launch(nproc))
    from steelyard.evaluate import perplexity

    request = perplexity.PerplexityRequest(
        checkpoint,
        data,
        sequence_length,
        stride,
        protocol.value,
        tensor,
        tokenizer,
        device,
        dtype,
        mask,
        base,
        allow_unknown,
    )
    result = perplexity.perplexity(request)
    if result is not None:
        print_result(result, json, perplexity.as_text(result))


def tasks(
    checkpoint: CheckpointArgument,
    tasks: Annotated[str, typer.Option(help="Names of lm-eval tasks, joined by commas.")],
    shots: Annotated[int | None, typer.Option(min=0, help="Few-shot examples.  [default: the task's]")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Use only the first N samples of each task.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Batch size.")] = 8,
    include: Annotated[str | None, typer.Option(metavar="DIR", help="A folder with your task definitions.")] = None,
    tokenizer: TokenizerOption = None,
    mask: MaskOption = None,
    base: BaseOption = None,
    device: DeviceOption = DeviceChoice.auto,
    dtype: DtypeOption = DtypeChoice.auto,
    json: JsonOption = False,
) -> None:
    """Evaluate a model on tasks of lm-eval (pip install 'steelyard[eval]').

    Example: steelyard eval tasks runs/mine --tasks hellaswag,piqa --limit 100
    """
    from steelyard.evaluate import tasks as scoring
    from steelyard.evaluate.generation import writer

    scoring.check_installed()
    options = scoring.TaskOptions(shots, limit, batch, include)
    result = scoring.run(writer(checkpoint, tokenizer, device, dtype, mask, base), tasks.split(","), options)
    print_result(result, json, scoring.as_text(result))


SUBCOMMANDS = (ppl, tasks)
