"""`steelyard mask`: apply, export and inspect mask files."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from steelyard.cli.options import BaseOption, JsonOption, TokenizerOption, print_result

MaskArgument = Annotated[Path, typer.Argument(metavar="MASK", help="A mask file.", show_default=False)]


class MaskFormat(StrEnum):
    """Output formats of masks."""

    packed = "packed"
    hf = "hf"


def apply(
    base: Annotated[str, typer.Argument(metavar="BASE", help="The checkpoint of the masks, in any format.")],
    mask: MaskArgument,
    destination: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write.")],
    tokenizer: TokenizerOption = None,
    json: JsonOption = False,
) -> None:
    """Write a checkpoint as a Hugging Face folder, with the masks applied.

    Example: steelyard mask apply models/Llama-3.1-8B wanda.mask pruned
    """
    from steelyard.sparsity import mask_export as exporting

    result = exporting.apply(base, mask, destination, tokenizer)
    print_result(result, json, f"{destination}: hf, {result['dtype']}")


def export(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN|CKPT", help="A run with [sparsity], one of its checkpoints, or a checkpoint of MaskLLM."
        ),
    ],
    destination: Annotated[Path, typer.Argument(metavar="OUT", help="The file or folder to write.")],
    format: Annotated[
        MaskFormat, typer.Option(help="packed: only the masks. hf: the weights, with the masks applied.")
    ] = MaskFormat.packed,
    base: BaseOption = None,
    tokenizer: TokenizerOption = None,
    json: JsonOption = False,
) -> None:
    """Export the learned masks of a run, or its weights with the masks applied.

    Example: steelyard mask export runs/masks learned.mask
    """
    from steelyard.sparsity.mask_export import as_text, write

    result = write(run, destination, format.value, base, tokenizer)
    print_result(result, json, as_text(result))


def info(mask: MaskArgument, json: JsonOption = False) -> None:
    """Show the content of a mask file: pattern, matrices, bits per weight, base model and method.

    Example: steelyard mask info wanda.mask
    """
    from steelyard.sparsity.mask_file import as_text, described

    result = described(mask)
    print_result(result, json, as_text(result))


SUBCOMMANDS = (apply, export, info)
