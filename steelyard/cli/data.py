"""`steelyard data`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from steelyard.cli.options import JsonOption, print_result


def register(root: typer.Typer, name: str, help_: str) -> None:
    """Add the commands to the tree."""
    group = typer.Typer(help=help_, rich_markup_mode=None, no_args_is_help=True)
    group.callback()(lambda: None)
    group.command("tokenize")(tokenize)
    root.add_typer(group, name=name)


def tokenize(
    input: Annotated[list[Path], typer.Option(help="Text files: .txt, one document a line, or .jsonl.")],
    tokenizer: Annotated[str, typer.Option(help="The tokenizer's folder.")],
    output_prefix: Annotated[str, typer.Option(help="Writes PREFIX_text_document.bin and .idx.")],
    json: JsonOption = False,
) -> None:
    """Turn text into token files, each document closed by the end-of-document token.

    Example: steelyard data tokenize --input corpus.jsonl --tokenizer tokenizers/mine --output-prefix data/mine
    """
    from steelyard.text import tokenizer as tokenizers
    from steelyard.text.corpus import documents
    from steelyard.tokens import preprocess

    loaded = tokenizers.load(tokenizer)
    prefix = f"{output_prefix}_text_document"
    result = preprocess.tokenize(
        documents(input), loaded.encode_batch, loaded.end_of_document, loaded.vocab_size, prefix
    )
    text = f"{result['prefix']}: {result['documents']} documents, {result['tokens']} tokens"
    print_result(result, json, text)
