"""`steelyard tokenizer`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from steelyard.cli.options import JsonOption, print_result


def register(root: typer.Typer, name: str, help_: str) -> None:
    """Add the commands to the tree."""
    group = typer.Typer(help=help_, rich_markup_mode=None, no_args_is_help=True)
    group.callback()(lambda: None)
    group.command("train")(train)
    root.add_typer(group, name=name)


def train(
    input: Annotated[list[Path], typer.Option(help="Text files: .txt, one document a line, or .jsonl.")],
    model_prefix: Annotated[Path, typer.Option(help="The folder to write.")],
    vocab_size: Annotated[int, typer.Option(min=1, help="How many tokens to learn.")],
    json: JsonOption = False,
) -> None:
    """Learn a byte-level BPE vocabulary and write it as a Hugging Face folder.

    Example: steelyard tokenizer train --input corpus.jsonl --model-prefix tokenizers/mine --vocab-size 8000
    """
    from steelyard.text import tokenizer as tokenizers
    from steelyard.text.corpus import documents

    trained = tokenizers.train_byte_bpe(documents(input), vocab_size)
    tokenizers.save(trained, model_prefix)
    text = f"{model_prefix}: {trained.vocab_size} tokens"
    print_result({"tokenizer": str(model_prefix), "vocab_size": trained.vocab_size}, json, text)
