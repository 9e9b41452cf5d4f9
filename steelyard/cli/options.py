"""Arguments and options that several commands share."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from steelyard.evaluate.verify_checkpoint import VerifyFindings


class DocumentSplit(StrEnum):
    """What separates documents in plain text."""

    line = "line"
    blank = "blank"
    file = "file"


class DeviceChoice(StrEnum):
    """Where to compute."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class DtypeChoice(StrEnum):
    """What to compute in."""

    auto = "auto"
    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


DocumentOption = Annotated[
    DocumentSplit,
    typer.Option("--document", help="A .txt holds one document per line, between blank lines, or per file."),
]
RecipeArgument = Annotated[str, typer.Argument(metavar="RECIPE", help="A recipe file, or the name of a shipped one.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="SECTION.KEY=VALUE", help="Change keys of the recipe.", show_default=False),
]
RunOption = Annotated[
    Path | None,
    typer.Option("--run", metavar="DIR", help="The run folder.  [default: runs/<recipe name>]", show_default=False),
]
CheckpointArgument = Annotated[
    str,
    typer.Argument(
        metavar="CKPT", help="A checkpoint of any format, or a run whose newest one is meant.", show_default=False
    ),
]
TokenizerOption = Annotated[
    str | None, typer.Option(metavar="PATH", help="The tokenizer, where the checkpoint's own is not meant.")
]
DeviceOption = Annotated[DeviceChoice, typer.Option(help="Where to compute; auto is a GPU where there is one.")]
DtypeOption = Annotated[
    DtypeChoice, typer.Option(help="Precision; auto is fp32 on a CPU and the checkpoint's own on a GPU.")
]
MaskOption = Annotated[
    str | None,
    typer.Option(
        metavar="FILE|none",
        help="Masks to apply; none leaves out those that the checkpoint brings.",
        show_default=False,
    ),
]
BaseOption = Annotated[
    str | None,
    typer.Option(
        metavar="PATH", help="Where the weights of a run of masks are, if they were moved.", show_default=False
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")]


def print_result(result: dict[str, Any], as_json: bool, text: str) -> None:
    """Print a command's result for a person or for a program."""
    print(json.dumps(result, ensure_ascii=False) if as_json else text)


def print_findings(findings: VerifyFindings, as_json: bool) -> None:
    """Print what a verification found, and exit with 1 if anything is wrong."""
    print_result(findings.as_dict(), as_json, findings.as_text())
    if findings.problems:
        raise typer.Exit(1)
