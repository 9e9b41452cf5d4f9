"""`steelyard generate`."""

from __future__ import annotations

from typing import Annotated

import typer

from steelyard.cli.options import JsonOption, print_result


def register(root: typer.Typer, name: str, help_: str) -> None:
    """Add the command to the tree."""
    root.command(name)(generate)


def generate(
    checkpoint: Annotated[
        str, typer.Argument(metavar="CKPT", help="A checkpoint, or a run whose newest one is meant.")
    ],
    prompt: Annotated[str, typer.Option(help="What to continue.")],
    max_tokens: Annotated[int, typer.Option(min=1, help="How many tokens to write at most.")] = 100,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 always takes the likeliest token.")] = 0.8,
    top_k: Annotated[int, typer.Option(min=0, help="Choose among the likeliest k; 0 among all.")] = 50,
    seed: Annotated[int, typer.Option(help="Seed of the choices.")] = 0,
    json: JsonOption = False,
) -> None:
    """Let a trained model continue a prompt.

    Example: steelyard generate runs/quickstart --prompt "def "
    """
    from steelyard.evaluate.generate import Sampling, from_checkpoint

    text = from_checkpoint(checkpoint, prompt, Sampling(max_tokens, temperature, top_k, seed))
    print_result({"prompt": prompt, "text": text}, json, text)
