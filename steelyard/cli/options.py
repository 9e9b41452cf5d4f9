"""Arguments and options that several commands share."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer


class DocumentSplit(StrEnum):
    """What separates documents in plain text."""

    line = "line"
    blank = "blank"
    file = "file"


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
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")]


def print_result(result: dict[str, Any], as_json: bool, text: str) -> None:
    """Print a command's result for a person or for a program."""
    print(json.dumps(result, ensure_ascii=False) if as_json else text)
