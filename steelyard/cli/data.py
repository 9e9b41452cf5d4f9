"""`steelyard data`: convert, tokenize, download, sample, count, deduplicate, inspect, verify and merge data."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from steelyard.cli.options import (
    AllowUnknownOption,
    BaseOption,
    CheckpointArgument,
    DeviceChoice,
    DeviceOption,
    DocumentOption,
    DocumentSplit,
    DtypeChoice,
    DtypeOption,
    JsonOption,
    MaskOption,
    SeedOption,
    TokenizerOption,
    TopKOption,
    TopPOption,
    print_result,
)
from steelyard.core.console import console
from steelyard.core.host import usable_cpus

SHORT = 128  # tokens
PrefixArgument = Annotated[str, typer.Argument(metavar="PREFIX", help="A pair of token files, without .bin and .idx.")]


class OnBadLine(StrEnum):
    """What to do with a document that cannot be parsed."""

    stop = "stop"
    skip = "skip"


def convert(
    files: Annotated[list[Path], typer.Argument(metavar="IN... OUT", help="The input files, then the output file.")],
    document: DocumentOption = DocumentSplit.line,
    json_key: Annotated[str, typer.Option(help="The key of the text, for a .txt output.")] = "text",
    json: JsonOption = False,
) -> None:
    """Convert between .txt, .jsonl and .parquet, each also with .gz or .zst.

    Example: steelyard data convert train-00000.parquet train-00001.parquet train.jsonl.zst
    """
    from steelyard.text.convert_corpus import convert as run

    if len(files) < 2:
        raise typer.BadParameter("give at least one input file and an output file")
    count = run(files[:-1], files[-1], document.value, json_key)
    print_result({"output": str(files[-1]), "documents": count}, json, f"{files[-1]}: {count} documents")


def tokenize(
    input: Annotated[list[str], typer.Option(help="Files or patterns: .txt, .jsonl, .parquet, also .gz or .zst.")],
    tokenizer: Annotated[str, typer.Option(help="A tokenizer of any kind, see steelyard tokenizer info --help.")],
    output_prefix: Annotated[str, typer.Option(help="Writes PREFIX_KEY_document.bin and .idx.")],
    json_keys: Annotated[
        list[str] | None, typer.Option(help="Keys of the texts; each key gets a pair of files. [text]")
    ] = None,
    append_eod: Annotated[
        bool, typer.Option("--append-eod", help="Append the end-of-document token to each document.")
    ] = False,
    workers: Annotated[int | None, typer.Option(min=1, help="Number of processes.  [default: one per core]")] = None,
    on_bad_line: Annotated[
        OnBadLine, typer.Option(help="Stop at a document that cannot be parsed, or skip and count it.")
    ] = OnBadLine.stop,
    document: DocumentOption = DocumentSplit.line,
    fixed_length: Annotated[
        int | None,
        typer.Option(min=1, help="Cut the joined text into samples of this many tokens, for data.fixed_length."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the output of another job.")] = False,
    allow_unknown: AllowUnknownOption = False,
    json: JsonOption = False,
) -> None:
    """Tokenize text into Megatron's token files. After a kill, the same command continues.

    Example: steelyard data tokenize --input "corpus/*.jsonl.gz" --tokenizer gpt2 --output-prefix data/mine --append-eod
    """
    from steelyard.tokens import preprocess
    from steelyard.tokens.tokenize_job import TokenizeJob

    keys = tuple(key for entry in json_keys or ["text"] for key in entry.split(","))
    job = TokenizeJob(
        tuple(input), tokenizer, output_prefix, keys, append_eod, document.value, on_bad_line.value, fixed_length
    )
    result = preprocess.tokenize(job, workers or len(usable_cpus()), overwrite, allow_unknown)
    for example in result["examples"]:
        console.warn(f"skipped {example}")
    _warn_of_short_lines(input, document, list(result["files"].values()))
    lines = [
        f"{made['prefix']}: {made['documents']} documents, {made['tokens']} tokens, {made['dtype']}"
        + (f", {made['dropped_tokens']} tokens at the end dropped" if "dropped_tokens" in made else "")
        + (f", {unknown} unknown" if (unknown := result.get("unknown", {}).get(key)) else "")
        for key, made in result["files"].items()
    ]
    lines += [f"{result['skipped']} bad documents skipped"] if result["skipped"] else []
    print_result(result, json, "\n".join(lines))


def _warn_of_short_lines(inputs: list[str], document: DocumentSplit, made: list[dict[str, Any]]) -> None:
    """Warn if every line of a text became a short document: a model then never sees whole texts."""
    tokens, documents = (sum(each[key] for each in made) for key in ("tokens", "documents"))
    is_text = any(".txt" in Path(name).suffixes for name in inputs)
    if is_text and document is DocumentSplit.line and documents > 1 and tokens < SHORT * documents:
        console.warn(
            f"every line became a document, of {tokens / documents:.0f} tokens on average; "
            "--document blank or file keeps a text together"
        )


def download(
    source: Annotated[str, typer.Argument(metavar="NAME|URL", help="See the list below.")],
    out: Annotated[Path, typer.Option(help="The output folder.")],
    shards: Annotated[str, typer.Option(help="c4, bookcorpus, arxiv: the shards, like 0-3 or 0,7.")] = "0",
    json: JsonOption = False,
) -> None:
    """Download a dataset. Existing files are not downloaded again; an interrupted download is resumed.

    NAME is wikitext-2-v1, wikitext-2-raw-v1, wikitext-103-v1 or wikitext-103-raw-v1 (one jsonl per split), c4 (English,
    jsonl.gz shards), bookcorpus (parquet shards), arxiv (papers of RedPajama, jsonl shards), arxiv-sample,
    openassistant or openassistant-guanaco (conversations, one jsonl per split), or hf:org/name or hf:org/name/config
    (any dataset of the hub; needs the datasets library). A URL downloads one file.

    Example: steelyard data download wikitext-2-raw-v1 --out data/wikitext-2
    """
    from steelyard.text.download import download as run

    paths = [str(path) for path in run(source, out, shards)]
    print_result({"files": paths}, json, "\n".join(paths))


def sample(
    checkpoint: CheckpointArgument,
    tokens: Annotated[int, typer.Option(min=1, help="Sample about this many tokens.")],
    output_prefix: Annotated[str, typer.Option(help="Writes PREFIX_text_document.bin and .idx.")],
    length: Annotated[
        int | None, typer.Option(min=1, help="Tokens per text.  [default: 1024, or the context]", show_default=False)
    ] = None,
    rows: Annotated[int, typer.Option(min=1, help="Texts that are decoded at once.")] = 64,
    start: Annotated[
        str | None,
        typer.Option(help="What each text follows, not written.  [default: as of an empty prompt]", show_default=False),
    ] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="Sampling temperature, above 0.")] = 1.0,
    top_k: TopKOption = 0,
    top_p: TopPOption = 1.0,
    seed: SeedOption = 0,
    tokenizer: TokenizerOption = None,
    mask: MaskOption = None,
    base: BaseOption = None,
    device: DeviceOption = DeviceChoice.auto,
    dtype: DtypeOption = DtypeChoice.auto,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the output of another job.")] = False,
    json: JsonOption = False,
) -> None:
    """Write token files of text that a model generates, to prune or distill it without its training data.

    After a kill, the same command continues.

    Example: steelyard data sample models/SmolLM2 --tokens 8000000 --rows 512 --output-prefix data/own
    """
    from steelyard.evaluate import generation, sample_tokens

    opened = generation.writer(checkpoint, tokenizer, device, dtype, mask, base)
    begins = tuple(opened.tokenizer.framed(start or "")) or (opened.tokenizer.end_of_document,)
    length = length or max(1, min(1024, opened.context - len(begins)))
    job = sample_tokens.SampleJob(
        output_prefix, tokens, length, min(rows, -(-tokens // length)), begins,
        generation.Sampling(length, temperature, top_k, top_p, seed),
    )  # fmt: skip
    result = sample_tokens.sample(job, opened, sample_tokens.weights_of(checkpoint, mask, base), overwrite)
    made, speed = result["files"]["text"], result["tokens_per_second"]
    text = f"{made['prefix']}: {made['documents']} documents, {made['tokens']} tokens, {made['dtype']}"
    print_result(result, json, text + (f", {speed:,.0f} tokens/s" if speed else ""))


def stats(
    paths: Annotated[list[str], typer.Argument(metavar="PATH...", help="Text files, patterns or folders.")],
    tokenizer: Annotated[
        str | None, typer.Option(help="Count the characters that this tokenizer has no token for.")
    ] = None,
    json_key: Annotated[str, typer.Option(help="The key of the text in .jsonl and .parquet.")] = "text",
    document: DocumentOption = DocumentSplit.line,
    json: JsonOption = False,
) -> None:
    """Count documents, their lengths, Unicode scripts, exact duplicates and unknown characters, in one pass.

    Example: steelyard data stats corpus/ --tokenizer gpt2
    """
    from steelyard.text import corpus_stats
    from steelyard.text import tokenizer as tokenizers
    from steelyard.text.corpus import corpus_files

    files = list(corpus_files(paths).values())
    loaded = None if tokenizer is None else tokenizers.load_tokenizer(tokenizer)
    result = corpus_stats.stats(files, document.value, json_key, loaded)
    print_result(result, json, corpus_stats.as_text(result))


def dedup(
    paths: Annotated[
        list[str],
        typer.Argument(metavar="PATH... OUT", help="Text files, patterns or folders, then the output folder."),
    ],
    json_key: Annotated[str, typer.Option(help="The key of the text in .jsonl and .parquet.")] = "text",
    document: DocumentOption = DocumentSplit.line,
    json: JsonOption = False,
) -> None:
    """Remove documents whose text occurs before, in the same file or another. After a kill, the same command continues.

    OUT gets each file without its duplicates, removed.jsonl with what was removed, and the report dedup.json.

    Example: steelyard data dedup corpus/*.jsonl.gz corpus-unique
    """
    from steelyard.text.dedup import DedupJob
    from steelyard.text.dedup import dedup as run

    if len(paths) < 2:
        raise typer.BadParameter("give at least one input and the output folder")
    result = run(DedupJob(tuple(paths[:-1]), Path(paths[-1]), document.value, json_key))
    del result["made_of"]
    text = f"{result['output']}: {result['kept']} of {result['documents']} documents kept, {result['removed']} removed"
    print_result(result, json, text)


def info(
    prefix: PrefixArgument,
    tokenizer: Annotated[str | None, typer.Option(help="Decode the first tokens with this tokenizer.")] = None,
    json: JsonOption = False,
) -> None:
    """Show the content of a pair of token files.

    Example: steelyard data info data/mine_text_document --tokenizer gpt2
    """
    from steelyard.tokens.inspect import describe, histogram_lines

    decode = None
    if tokenizer is not None:
        from steelyard.text import tokenizer as tokenizers

        decode = tokenizers.load_tokenizer(tokenizer).decode
    result = describe(prefix, decode)
    lines = [f"{key:12} {value}" for key, value in result.items() if key != "histogram"]
    print_result(result, json, "\n".join([*lines, *histogram_lines(result["histogram"])]))


def verify(
    prefix: PrefixArgument,
    vocab_size: Annotated[int | None, typer.Option(min=1, help="Every id must be below this.")] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Every id must be one of this tokenizer; unknown tokens are counted.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Verify a pair of token files: the index, all checksums, and with --vocab-size or --tokenizer every id.

    Exits with 1 if corrupt. Example: steelyard data verify data/mine_text_document --tokenizer gpt2
    """
    from steelyard.tokens.inspect import verify as run

    if tokenizer is None:
        result, counted = run(prefix, vocab_size), ""
    else:
        from steelyard.text import tokenizer as tokenizers

        loaded = tokenizers.load_tokenizer(tokenizer)
        result = run(prefix, min(vocab_size or loaded.vocab_size, loaded.vocab_size), loaded.unknown_id)
        tokenizers.report_unknown(result["unknown"], result["tokens"], loaded, prefix, allowed=True)
        counted = f", {result['unknown']} unknown"
    unchecked = "" if result["checksums"] else "; it has no checksums, so only its index was checked"
    print_result(
        result,
        json,
        f"{prefix}: valid, {result['documents']} documents, {result['tokens']} tokens{counted}{unchecked}",
    )


def merge(
    prefixes: Annotated[
        list[str], typer.Argument(metavar="PREFIX... OUT", help="The pairs to merge, then the output.")
    ],
    json: JsonOption = False,
) -> None:
    """Merge pairs of token files into one.

    Example: steelyard data merge data/a_text_document data/b_text_document data/ab_text_document
    """
    from steelyard.tokens import merge

    if len(prefixes) < 2:
        raise typer.BadParameter("give at least one input pair and an output")
    result = merge.merge(prefixes[:-1], prefixes[-1])
    print_result(result, json, f"{result['prefix']}: {result['documents']} documents, {result['tokens']} tokens")


SUBCOMMANDS = (convert, tokenize, download, sample, stats, dedup, info, verify, merge)
