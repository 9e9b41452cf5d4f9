"""`steelyard checkpoint`: convert, extend, inspect, compare and verify checkpoints of any format."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from steelyard.cli.options import JsonOption, print_findings, print_result
from steelyard.core import units
from steelyard.core.errors import UserError

SourceArgument = Annotated[
    str,
    typer.Argument(
        metavar="SRC",
        help="A Hugging Face folder or name on the hub, a GGUF file, a Megatron, Megatron-DeepSpeed or Steelyard "
        "checkpoint, or a run.",
    ),
]


class CheckpointFormat(StrEnum):
    """Output formats."""

    hf = "hf"
    megatron = "megatron"
    megatron_dist = "megatron-dist"
    steelyard = "steelyard"
    gguf = "gguf"


class StoredDtype(StrEnum):
    """Output dtypes."""

    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


class WrittenDtype(StrEnum):
    """Output dtypes of a conversion."""

    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"
    q8_0 = "q8_0"


class Layers(StrEnum):
    """Megatron's layer implementations, which name the norms differently."""

    local = "local"
    transformer_engine = "transformer-engine"


def convert(
    source: SourceArgument,
    destination: Annotated[Path, typer.Argument(metavar="DST", help="The folder to write, or the GGUF file.")],
    to: Annotated[CheckpointFormat, typer.Option(help="The output format.")],
    tensor: Annotated[int, typer.Option(min=1, help="Tensor-parallel size of a megatron checkpoint.")] = 1,
    pipeline: Annotated[int, typer.Option(min=1, help="Pipeline-parallel size of a megatron checkpoint.")] = 1,
    partition: Annotated[
        str | None, typer.Option(help="Layers of each pipeline rank, such as 11-13.", show_default=False)
    ] = None,
    layers: Annotated[Layers, typer.Option(help="The naming of the norms in a megatron checkpoint.")] = Layers.local,
    grouped_experts: Annotated[
        bool, typer.Option("--grouped-experts", help="Name the experts as --moe-grouped-gemm of Megatron does.")
    ] = False,
    dtype: Annotated[
        WrittenDtype | None,
        typer.Option(help="q8_0 only for gguf. [default: that of the source; fp16 for gguf]", show_default=False),
    ] = None,
    shard_size: Annotated[str, typer.Option(help="Maximum size of an hf weight file.")] = "5GB",
    tokenizer: Annotated[
        str | None, typer.Option(help="The tokenizer, if the source has none.", show_default=False)
    ] = None,
    json: JsonOption = False,
) -> None:
    """Convert a checkpoint to another format or layout. Needs no GPU and little memory.

    Example: steelyard checkpoint convert models/Llama-3.1-70B megatron --to megatron --tensor 8 --pipeline 2

    Example: steelyard checkpoint convert pruned pruned.gguf --to gguf --dtype q8_0
    """
    from steelyard.checkpoint.formats import open_source
    from steelyard.checkpoint.formats.megatron_layout import MegatronLayout
    from steelyard.checkpoint.formats.write import DTYPES, Target
    from steelyard.checkpoint.formats.write import convert as write

    engine = layers is Layers.transformer_engine
    layout = MegatronLayout(tensor, pipeline, _counts(partition) if partition else None, engine, grouped_experts)
    stored = DTYPES.get(dtype.value) if dtype else None
    quantization = "Q8_0" if dtype is WrittenDtype.q8_0 else None
    target = Target(to.value, layout, stored, _bytes(shard_size), tokenizer, quantization)
    result = write(open_source(source), destination, target)
    print_result(result, json, f"{destination}: {to.value}, {result['dtype']}, {units.size(result['bytes'])}")


def extend(
    source: SourceArgument,
    destination: Annotated[Path, typer.Argument(metavar="OUT", help="The Hugging Face folder to write.")],
    tokenizer: Annotated[str, typer.Option(help="The extended tokenizer, as tokenizer extend writes it.")],
    dtype: Annotated[StoredDtype | None, typer.Option(help="[default: that of the source]", show_default=False)] = None,
    json: JsonOption = False,
) -> None:
    """Add rows for the new pieces of an extended tokenizer to embedding and head.

    A new row is the mean of the rows of the pieces that it replaces. All other rows stay as they are.

    Example: steelyard checkpoint extend models/Llama-3.1-8B models/llama-ja --tokenizer tokenizers/llama3-ja
    """
    from steelyard.checkpoint.formats import open_source
    from steelyard.checkpoint.formats.extended_source import ExtendedSource
    from steelyard.checkpoint.formats.write import DTYPES, Target, convert

    extended = ExtendedSource(open_source(source), tokenizer)
    written = convert(extended, destination, Target("hf", dtype=DTYPES[dtype.value] if dtype else None))
    before, after = extended.origin.config.vocab, extended.config.vocab
    result = {**written, "new_pieces": len(extended.parts), "vocab_before": before, "vocab": after}
    text = f"{destination}: {len(extended.parts)} new pieces, {before} rows before, {after} now"
    print_result(result, json, f"{text}, {result['dtype']}, {units.size(result['bytes'])}")


def info(source: SourceArgument, json: JsonOption = False) -> None:
    """Show the format, layout, parameters, step, dtype and configuration of a checkpoint.

    Exits with 1 if a tensor is missing, is unknown, or does not have the size in the configuration.

    Example: steelyard checkpoint info runs/quickstart
    """
    from steelyard.checkpoint.formats import open_source
    from steelyard.checkpoint.formats.compare import info as look

    result = look(open_source(source))
    lines = {**{key: value for key, value in result.items() if key not in ("model", "problems")}, **result["model"]}
    problems = [f"{'problem':16} {line}" for line in result["problems"]]
    print_result(result, json, "\n".join([*(f"{key:16} {_shown(value)}" for key, value in lines.items()), *problems]))
    if problems:
        raise typer.Exit(1)


def verify(
    path: Annotated[
        Path, typer.Argument(metavar="PATH", help="A checkpoint of any format, a run, or one of its files.")
    ],
    json: JsonOption = False,
) -> None:
    """Verify a checkpoint: every checksum, the name and size of every tensor, every value, the tokenizer.

    Prints one line per problem and exits with 1, or prints what was checked and what has no checksum.

    Example: steelyard checkpoint verify models/Llama-3.1-8B
    """
    from steelyard.evaluate.verify_checkpoint import verify_checkpoint

    print_findings(verify_checkpoint(path), json)


def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="A checkpoint of any format.")],
    b: Annotated[str, typer.Argument(metavar="B", help="Another checkpoint.")],
    logits: Annotated[bool, typer.Option("--logits", help="Also compare the logits of the models.")] = False,
    prompt: Annotated[str | None, typer.Option(help="The prompt for the logits.", show_default=False)] = None,
    json: JsonOption = False,
) -> None:
    """Compare two checkpoints of any formats: names, sizes, and the largest difference of a weight.

    Exits with 0 if they are equivalent, with 1 if a weight or a setting that affects the result differs.

    Example: steelyard checkpoint diff models/Llama-3.1-8B megatron --logits
    """
    from steelyard.checkpoint.formats import compare, open_source

    sources = open_source(a), open_source(b)
    result = compare.diff(*sources)
    if logits or prompt is not None:
        result["largest_logit_difference"] = compare.logits_difference(*sources, prompt or compare.PROMPT)
    print_result(result, json, "\n".join(f"{key:24} {_shown(value)}" for key, value in result.items()))
    if result["differ"]:
        raise typer.Exit(1)


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_shown(inner)}" for key, inner in value.items()) or "none"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    if value is None or isinstance(value, bool):
        return {None: "none", True: "yes", False: "no"}[value]
    return f"{value:,}" if isinstance(value, int) else str(value)


def _counts(partition: str) -> tuple[int, ...]:
    if not all(part.isdecimal() and len(part) < 6 for part in partition.split("-")):
        raise UserError(
            f"{partition:.40} is not a partition", where="--partition", hint="layer counts joined by dashes: 11-13"
        )
    return tuple(map(int, partition.split("-")))


def _bytes(size: str) -> int:
    number, unit = size[:-2], size[-2:].upper()
    scale = {"KB": 10**3, "MB": 10**6, "GB": 10**9}.get(unit)
    if scale is None or not number.isdecimal() or len(number) > 15 or int(number) == 0:
        raise UserError(f"{size:.40} is not a size", where="--shard-size", hint="such as 500MB or 5GB")
    return int(number) * scale


SUBCOMMANDS = (convert, extend, info, diff, verify)
