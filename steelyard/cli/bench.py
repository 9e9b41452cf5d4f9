"""`steelyard bench`: the speed of a model on this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from steelyard.cli.options import (
    BaseOption,
    DeviceChoice,
    DeviceOption,
    DtypeChoice,
    DtypeOption,
    JsonOption,
    MaskOption,
    ValuesChoice,
    print_result,
)


def sparse(
    checkpoint: Annotated[
        str | None, typer.Argument(metavar="[CKPT]", help="A 2:4 checkpoint, or a run.", show_default=False)
    ] = None,
    shape: Annotated[
        str | None, typer.Option(help="Measure this recipe's model with random weights, without a checkpoint.")
    ] = None,
    mask: MaskOption = None,
    base: BaseOption = None,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of the prompt, for the prefill.")] = 4096,
    context: Annotated[int, typer.Option(min=1, help="Tokens of context, for the decoding.")] = 512,
    batch: Annotated[list[int] | None, typer.Option(min=1, help="Batch sizes.  [default: 1 2 4 8 16]")] = None,
    allow_dense: Annotated[bool, typer.Option("--allow-dense", help="Keep matrices that are not 2:4 dense.")] = False,
    values: Annotated[
        list[ValuesChoice] | None,
        typer.Option(help="Also measure 8-bit values; may be repeated.  [default: those of the checkpoint]"),
    ] = None,
    device: DeviceOption = DeviceChoice.auto,
    dtype: DtypeOption = DtypeChoice.auto,
    json: JsonOption = False,
) -> None:
    """Compare tokens per second and memory of a 2:4 model, dense and compressed.

    Example: steelyard bench sparse compressed

    Example: steelyard bench sparse --shape llama3.1-8b --values int8 --values fp8
    """
    from steelyard.evaluate import sparse_bench

    batches = tuple(batch) if batch else (1, 2, 4, 8, 16)
    request = sparse_bench.BenchRequest(
        checkpoint, shape, mask, base, device, dtype, prompt, context, batches, allow_dense,
        tuple(each.value for each in values or ()),
    )  # fmt: skip
    result = sparse_bench.sparse(request)
    print_result(result, json, sparse_bench.as_text(result))


SUBCOMMANDS = (sparse,)
