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
    prompt: Annotated[str, typer.Option(help="The text to continue.")],
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum number of new tokens.")] = 100,
    temperature: Annotated[float, typer.Option(min=0.0, help="Sampling temperature; 0 is greedy.")] = 0.8,
    top_k: Annotated[int, typer.Option(min=0, help="Sample from the k most likely tokens; 0 from all.")] = 50,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="Nucleus sampling: total probability.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Sampling seed.")] = 0,
    stream: Annotated[bool, typer.Option("--stream", help="Print the text while it is generated.")] = False,
    tokenizer: TokenizerOption = None,
    mask: MaskOption = None,
    base: BaseOption = None,
    device: DeviceOption = DeviceChoice.auto,
    dtype: DtypeOption = DtypeChoice.auto,
    json: JsonOption = False,
) -> None:
    """Continue a prompt with a trained model.

    Example: steelyard generate runs/quickstart --prompt "def " --stream
    """
    if stream and json:
        raise UserError(
            "--stream and --json cannot be combined: --json prints one object at the end", hint="choose one"
        )
    from steelyard.evaluate.generation import Sampling, result, writer

    sampling = Sampling(max_tokens, temperature, top_k, top_p, seed)
    opened = writer(checkpoint, tokenizer, device, dtype, mask, base)
    if not stream:
        generated = result(opened, prompt, sampling)
        return print_result(generated, json, generated["text"])
    print(prompt, end="", flush=True)
    for piece in opened.stream(prompt, sampling):
        print(piece, end="", flush=True)
    print()
