"""`steelyard generate`."""

from __future__ import annotations

from typing import Annotated

import typer

from steelyard.cli.options import (
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
from steelyard.core.errors import UserError


def register(root: typer.Typer, name: str, help_: str) -> None:
    """Add the command to the tree."""
    root.command(name)(generate)


def generate(
    checkpoint: CheckpointArgument,
    prompt: Annotated[str, typer.Option(help="What to continue.")],
    max_tokens: Annotated[int, typer.Option(min=1, help="How many tokens to write at most.")] = 100,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 always takes the likeliest token.")] = 0.8,
    top_k: Annotated[int, typer.Option(min=0, help="Choose among the likeliest k; 0 among all.")] = 50,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="Choose among the likeliest with this share.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of the choices.")] = 0,
    stream: Annotated[bool, typer.Option("--stream", help="Print the text as it comes.")] = False,
    tokenizer: TokenizerOption = None,
    mask: MaskOption = None,
    base: BaseOption = None,
    device: DeviceOption = DeviceChoice.auto,
    dtype: DtypeOption = DtypeChoice.auto,
    json: JsonOption = False,
) -> None:
    """Let a trained model continue a prompt.

    Example: steelyard generate runs/quickstart --prompt "def " --stream
    """
    if stream and json:
        raise UserError("--stream prints text as it comes, and --json one object at the end", hint="choose one of them")
    from steelyard.evaluate.generation import Sampling, result, writer

    sampling = Sampling(max_tokens, temperature, top_k, top_p, seed)
    opened = writer(checkpoint, tokenizer, device, dtype, mask, base)
    if not stream:
        written = result(opened, prompt, sampling)
        return print_result(written, json, written["text"])
    print(prompt, end="", flush=True)
    for piece in opened.stream(prompt, sampling):
        print(piece, end="", flush=True)
    print()
