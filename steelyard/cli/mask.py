"""`steelyard mask`: masks as files of their own."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from steelyard.cli.options import BaseOption, JsonOption, TokenizerOption, print_result

MaskArgument = Annotated[Path, typer.Argument(metavar="MASK", help="A mask file.", show_default=False)]


class MaskFormat(StrEnum):
    """How masks are written."""

    packed = "packed"
    hf = "hf"


def register(root: typer.Typer, name: str, help_: str) -> None:
    """Add the commands to the tree."""
    group = typer.Typer(help=help_, rich_markup_mode=None, no_args_is_help=True)
    for command in (apply, export, info):
        group.command(command.__name__)(command)
    root.add_typer(group, name=name)


def apply(
    base: Annotated[
        str, typer.Argument(metavar="BASE", help="The checkpoint that the masks belong to, of any format.")
    ],
    mask: MaskArgument,
    destination: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write.")],
    tokenizer: TokenizerOption = None,
    json: JsonOption = False,
) -> None:
    """Write a checkpoint as a Hugging Face folder, with zeros where the masks have them.

    Example: steelyard mask apply models/Llama-3.1-8B wanda.mask pruned
    """
    from steelyard.sparsity import mask_export as exporting

    result = exporting.apply(base, mask, destination, tokenizer)
    print_result(result, json, f"{destination}: hf, {result['dtype']}")


def export(
    run: Annotated[
        str,
        typer.Argument(metavar="RUN|CKPT", help="A run with a [sparsity] section, a checkpoint of one, or MaskLLM's."),
    ],
    destination: Annotated[Path, typer.Argument(metavar="OUT", help="The file or folder to write.")],
    format: Annotated[
        MaskFormat, typer.Option(help="packed: the masks alone. hf: the weights, with zeros where the masks have them.")
    ] = MaskFormat.packed,
    base: BaseOption = None,
    tokenizer: TokenizerOption = None,
    json: JsonOption = False,
) -> None:
    """Write the masks that a run has learned, or its weights under them.

    Example: steelyard mask export runs/masks learned.mask
    """
    from steelyard.sparsity.mask_export import as_text, write

    result = write(run, destination, format.value, base, tokenizer)
    print_result(result, json, as_text(result))


def info(mask: MaskArgument, json: JsonOption = False) -> None:
    """Say what a mask file holds: pattern, matrices, bits a weight, what it was made for and how.

    Example: steelyard mask info wanda.mask
    """
    from steelyard.sparsity.mask_file import as_text, described

    result = described(mask)
    print_result(result, json, as_text(result))
