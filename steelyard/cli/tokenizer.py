"""`steelyard tokenizer`: train, extend, inspect and export tokenizers."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from steelyard.cli.options import DocumentOption, DocumentSplit, JsonOption, print_result
from steelyard.core.console import console

TokenizerArgument = Annotated[
    str,
    typer.Argument(
        metavar="TOKENIZER",
        help="A Hugging Face folder or name, a tokenizer.json, a SentencePiece .model, or vocab.json,merges.txt.",
    ),
]


class TokenizerKind(StrEnum):
    """Algorithms for training a vocabulary."""

    unigram = "unigram"
    bpe = "bpe"
    byte_bpe = "byte-bpe"


def train(
    input: Annotated[list[str], typer.Option(help="Files or patterns: .txt, .jsonl, .parquet, also .gz or .zst.")],
    model_prefix: Annotated[Path, typer.Option(help="Writes PREFIX.model and .vocab; for byte-bpe a folder.")],
    vocab_size: Annotated[int, typer.Option(min=1, help="Number of tokens.")],
    type: Annotated[
        TokenizerKind, typer.Option(help="SentencePiece unigram or bpe, or byte-level BPE.")
    ] = TokenizerKind.unigram,
    character_coverage: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Fraction of characters covered.")
    ] = 0.9995,
    sample: Annotated[int, typer.Option(min=0, help="Train on this many random lines; 0 on all.")] = 0,
    byte_fallback: Annotated[bool, typer.Option("--byte-fallback", help="Encode unknown characters as bytes.")] = False,
    split_digits: Annotated[bool, typer.Option("--split-digits", help="Every digit is a separate token.")] = False,
    symbols: Annotated[list[str] | None, typer.Option(help="User-defined tokens.", show_default=False)] = None,
    keep_whitespace: Annotated[
        bool, typer.Option("--keep-whitespace", help="Keep runs of blanks and do not normalize characters.")
    ] = False,
    json_key: Annotated[str, typer.Option(help="The key of the text.")] = "text",
    document: DocumentOption = DocumentSplit.line,
    json: JsonOption = False,
) -> None:
    """Train a tokenizer on text.

    Example: steelyard tokenizer train --input botchan.txt --model-prefix botchan --vocab-size 2000
    """
    from steelyard.text import tokenizer as tokenizers
    from steelyard.text.corpus import documents, named_files

    texts = documents(named_files(input), json_key, document.value)
    if type is TokenizerKind.byte_bpe:
        trained: tokenizers.Tokenizer = tokenizers.train_byte_bpe(texts, vocab_size, symbols or ())
        if trained.vocab_size < vocab_size:
            console.warn(f"the text yields only {trained.vocab_size} tokens, fewer than the requested {vocab_size}")
        trained.save(model_prefix)
        written = [str(model_prefix)]
    else:
        options = tokenizers.SentencePieceOptions(
            type.value, character_coverage, sample, byte_fallback, split_digits, tuple(symbols or ()), keep_whitespace
        )
        trained = tokenizers.train_sentencepiece(texts, vocab_size, options)
        written = trained.write(model_prefix)
    result = {"files": written, "kind": trained.kind, "vocab_size": trained.vocab_size}
    print_result(result, json, f"{', '.join(written)}: {trained.kind}, {trained.vocab_size} tokens")


def extend(
    tokenizer: Annotated[str, typer.Argument(metavar="BASE", help="The tokenizer to extend, BPE or Unigram.")],
    text: Annotated[
        list[str], typer.Option(metavar="FILE", help="Files or patterns: .txt, .jsonl, .parquet, also .gz or .zst.")
    ],
    add: Annotated[int, typer.Option(min=1, help="Number of new pieces.")],
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="The Hugging Face folder to write.")],
    sample: Annotated[int, typer.Option(min=0, help="Use this many random documents; 0 all.")] = 0,
    json_key: Annotated[str, typer.Option(help="The key of the text.")] = "text",
    document: DocumentOption = DocumentSplit.line,
    json: JsonOption = False,
) -> None:
    """Add pieces for another text to a tokenizer. Existing pieces keep their ids.

    Example: steelyard tokenizer extend models/Llama-3.1-8B --text japanese.jsonl --add 8000 --out tokenizers/llama3-ja
    """
    from steelyard.text import tokenizer as tokenizers
    from steelyard.text.corpus import documents, named_files
    from steelyard.text.tokenizer.extend_vocabulary import extend_with_report

    base, paths = tokenizers.load_tokenizer(tokenizer), named_files(text)
    tokenizers.refuse_folder(out)
    extended, result = extend_with_report(base, lambda: documents(paths, json_key, document.value), add, sample)
    extended.save(out)
    lines = (f"{key:28} {value}" for key, value in result.items())
    print_result({"folder": str(out), **result}, json, "\n".join([f"{out}: {extended.kind}", *lines]))


def info(
    tokenizer: TokenizerArgument,
    encode: Annotated[str | None, typer.Option(help="Show the tokens of a text.")] = None,
    text: Annotated[
        str | None, typer.Option(metavar="FILE", help="Count the tokens of a file, and those that are unknown.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Show the type and size of a tokenizer, the tokens of a text, and the unknown tokens of a file.

    Example: steelyard tokenizer info botchan.model --encode "Because of an hereditary recklessness" --text botchan.txt
    """
    from steelyard.text import tokenizer as tokenizers
    from steelyard.text.corpus import documents, named_files
    from steelyard.text.tokenizer import unknown_tokens

    loaded = tokenizers.load_tokenizer(tokenizer)
    result: dict[str, object] = {
        "kind": loaded.kind,
        "vocab_size": loaded.vocab_size,
        "end_of_document": loaded.end_id,
        "fingerprint": loaded.fingerprint,
    }
    if encode is not None:
        ids = loaded.encode(encode)
        result |= {"ids": ids, "pieces": loaded.pieces(encode), "decoded": loaded.decode(ids)}
    if text is not None:
        paths = named_files([text])
        with console.progress("encode", sum(path.stat().st_size for path in paths), "B") as progress:
            counts = unknown_tokens.survey(loaded, documents(paths), progress.advance)
        unknown_tokens.report_unknown(counts["unknown"], counts["tokens"], loaded, text, allowed=True)
        result |= counts
    print_result(result, json, "\n".join(f"{key:16} {value}" for key, value in result.items()))


def export(
    tokenizer: TokenizerArgument,
    folder: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write.")],
    check: Annotated[
        Path | None, typer.Option(help="Encode this text with both tokenizers and count differences.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Export a tokenizer as a Hugging Face folder that gives the same ids.

    Example: steelyard tokenizer export botchan.model hf/botchan --check botchan.txt
    """
    from steelyard.text import tokenizer as tokenizers
    from steelyard.text.corpus import documents

    loaded = tokenizers.load_tokenizer(tokenizer)
    texts = (
        list(documents([check])) if check is not None else []
    )  # Read first: if it cannot be read, nothing is written.
    tokenizers.export_hf(loaded, folder)
    result: dict[str, object] = {"folder": str(folder), "kind": loaded.kind}
    text = f"{folder}: {loaded.kind}, {loaded.vocab_size} tokens"
    if check is not None:
        count, differences = tokenizers.differences(loaded, folder, texts)
        result |= {"texts": count, "different": len(differences)}
        text += f"\n{len(differences)} of {count} texts get different ids"
        for difference in differences[:5]:
            console.say(f"{difference.text!r}\n  {difference.before}\n  {difference.after}")
    print_result(result, json, text)


SUBCOMMANDS = (train, extend, info, export)
