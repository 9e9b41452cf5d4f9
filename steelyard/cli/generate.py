"""`steelyard generate`."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
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
    MaxTokensOption,
    SeedOption,
    SystemOption,
    TemperatureOption,
    TemplateOption,
    TokenizerOption,
    TopKOption,
    TopPOption,
    print_result,
)
from steelyard.core.errors import UserError


def generate(
    checkpoint: CheckpointArgument,
    prompt: Annotated[str, typer.Option(help="The text to continue, or with --chat the message.")],
    chat: Annotated[
        bool, typer.Option("--chat", help="The prompt is a message; print the model's answer, by its chat template.")
    ] = False,
    system: SystemOption = None,
    template: TemplateOption = None,
    max_tokens: MaxTokensOption = 100,
    temperature: TemperatureOption = 0.8,
    top_k: TopKOption = 50,
    top_p: TopPOption = 1.0,
    seed: SeedOption = 0,
    stream: Annotated[bool, typer.Option("--stream", help="Print the text while it is generated.")] = False,
    tokenizer: TokenizerOption = None,
    mask: MaskOption = None,
    base: BaseOption = None,
    device: DeviceOption = DeviceChoice.auto,
    dtype: DtypeOption = DtypeChoice.auto,
    json: JsonOption = False,
) -> None:
    """Continue a prompt with a trained model, or answer it.

    Example: steelyard generate runs/quickstart --prompt "def " --stream
    Example: steelyard generate runs/sft --chat --system "Be brief." --prompt "What is Slurm?"
    """
    if not chat and (system or template):
        raise UserError("--system and --template need --chat", hint="add --chat, or leave them out")
    if stream and json:
        raise UserError(
            "--stream and --json cannot be combined: --json prints one object at the end", hint="choose one"
        )
    from steelyard.evaluate.chat import open_chat
    from steelyard.evaluate.generation import Sampling, result, writer

    sampling = Sampling(max_tokens, temperature, top_k, top_p, seed)
    opened = writer(checkpoint, tokenizer, device, dtype, mask, base)
    pieces: Iterable[str]
    if chat:
        pieces = open_chat(opened, checkpoint, template, system).answer(prompt, sampling)
    else:
        pieces = chain([prompt], opened.stream(prompt, sampling))
    if not stream:
        generated = result(opened, prompt, pieces)
        return print_result(generated, json, generated["text"])
    for piece in pieces:
        print(piece, end="", flush=True)
    print()
