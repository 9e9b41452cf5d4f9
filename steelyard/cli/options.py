"""Arguments and options shared by several commands."""

from __future__ import annotations

import json
import math
import re
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from steelyard.core.errors import UserError

if TYPE_CHECKING:
    from steelyard.evaluate.verify_checkpoint import VerifyFindings

MOST_STEPS = 100_000  # of a range on the command line


class DocumentSplit(StrEnum):
    """The separator of documents in plain text."""

    line = "line"
    blank = "blank"
    file = "file"


class DeviceChoice(StrEnum):
    """The device to compute on."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class ValuesChoice(StrEnum):
    """The 8-bit formats of compressed 2:4 weights."""

    fp8 = "fp8"
    int8 = "int8"


class DtypeChoice(StrEnum):
    """The precision to compute in."""

    auto = "auto"
    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


AllowUnknownOption = Annotated[
    bool, typer.Option("--allow-unknown", help="Accept text of which more than 5% of the tokens are unknown.")
]
DocumentOption = Annotated[
    DocumentSplit,
    typer.Option(
        "--document", help="A .txt has one document per line, per paragraph between blank lines, or per file."
    ),
]
RecipeArgument = Annotated[
    str, typer.Argument(metavar="RECIPE", help="A recipe file, or the name of a shipped recipe.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="SECTION.KEY=VALUE", help="Override keys of the recipe.", show_default=False),
]
RunOption = Annotated[
    Path | None,
    typer.Option("--run", metavar="DIR", help="The run folder.  [default: runs/<recipe name>]", show_default=False),
]
CheckpointArgument = Annotated[
    str,
    typer.Argument(
        metavar="CKPT", help="A checkpoint of any format, or a run for its newest checkpoint.", show_default=False
    ),
]
TokenizerOption = Annotated[str | None, typer.Option(metavar="PATH", help="A tokenizer other than the checkpoint's.")]
DeviceOption = Annotated[DeviceChoice, typer.Option(help="Device; auto is a GPU if there is one.")]
DtypeOption = Annotated[
    DtypeChoice, typer.Option(help="Precision; auto is fp32 on a CPU and the checkpoint's dtype on a GPU.")
]
MaskOption = Annotated[
    str | None,
    typer.Option(
        metavar="FILE|none",
        help="Masks to apply; none ignores the masks of the checkpoint.",
        show_default=False,
    ),
]
BaseOption = Annotated[
    str | None,
    typer.Option(
        metavar="PATH", help="The base weights of a mask-learning run, if they were moved.", show_default=False
    ),
]
MaxTokensOption = Annotated[int, typer.Option(min=1, help="Maximum number of new tokens.")]
TemperatureOption = Annotated[float, typer.Option(min=0.0, help="Sampling temperature; 0 is greedy.")]
TopKOption = Annotated[int, typer.Option(min=0, help="Sample from the k most likely tokens; 0 from all.")]
TopPOption = Annotated[float, typer.Option(min=0.0, max=1.0, help="Nucleus sampling: total probability.")]
SeedOption = Annotated[int, typer.Option(help="Sampling seed.")]
SystemOption = Annotated[
    str | None, typer.Option(metavar="TEXT", help="The system prompt of the conversation.", show_default=False)
]
TemplateOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME|FILE",
        help="A chat template other than the model's own: chatml, llama2, llama3, alpaca, japanese, plain or a file.",
        show_default=False,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")]


def print_result(result: dict[str, Any], as_json: bool, text: str) -> None:
    """Print the result of a command as text or JSON."""
    print(json.dumps(result, ensure_ascii=False) if as_json else text)


def print_findings(findings: VerifyFindings, as_json: bool) -> None:
    """Print the findings of a verification, and exit with 1 if there are problems."""
    print_result(findings.as_dict(), as_json, findings.as_text())
    if findings.problems:
        raise typer.Exit(1)


def parse_count(option: str, what: str, text: str) -> int:
    """Parse a number of `what` such as 300B, 1.5T or 2e9."""
    factor = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}.get(text[-1:].upper(), 1)
    try:
        number = float(text[:-1] if factor != 1 else text) * factor
    except ValueError:
        number = 0
    if not 1 <= number < math.inf:
        raise UserError(
            f"{option}: {text!r} is not a number of {what}", hint="use a form like 124M, 1.5T or 2000000000"
        )
    return int(number)


def steps_in(text: str, option: str) -> list[int]:
    """The steps of a list like `10-12,500`, ascending. `10-12` is 10 and 11: the end is exclusive."""
    steps: set[int] = set()
    for part in text.split(","):
        matched = re.fullmatch(r"\s*([0-9]{1,9})(?:-([0-9]{1,9}))?\s*", part)
        first = int(matched[1]) if matched else 0
        end = int(matched[2]) if matched and matched[2] else first + 1
        if not 0 < first < end or end - first > MOST_STEPS:
            raise UserError(
                f"{option}: {part.strip() or 'an empty value'} is not a range of steps",
                hint="10-12 is steps 10 and 11: the end is exclusive",
            )
        steps.update(range(first, end))
    return sorted(steps)
