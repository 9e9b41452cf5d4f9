"""A command template with placeholders. Values are filled into an argument list, without a shell."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

STORAGE = (
    "STEELYARD_TUNE_STORAGE"  # Address of the study's database. It may contain a password, so trials do not get it.
)
OWN = ("trial", "folder")  # placeholders of every trial: its number and its folder
_NAME = r"[A-Za-z_][A-Za-z0-9_.-]*"
# Only braces around a name count: nested JSON ends in two braces that are not placeholders.
_PLACEHOLDER = re.compile(rf"(?<!\{{)\{{(?P<braced>\{{{_NAME}\}})\}}|\{{(?P<name>{_NAME})\}}")


def words(template: str) -> list[str]:
    """The arguments of a command, split like a shell does; raises ValueError for an unclosed quote."""
    return shlex.split(template)


def placeholders(template: Sequence[str]) -> set[str]:
    """The names in braces. Doubled braces are an escape for single ones; braces without a name (JSON) are kept."""
    return {match["name"] for word in template for match in _PLACEHOLDER.finditer(word) if match["name"]}


def filled(template: Sequence[str], values: Mapping[str, Any]) -> list[str]:
    """The arguments with their values. A value never becomes several arguments."""

    def value(match: re.Match[str]) -> str:
        return match["braced"] or shown(values[match["name"]])

    return [_PLACEHOLDER.sub(value, word) for word in template]


def shown(value: Any) -> str:
    """A value as a command-line argument."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def steelyard(*arguments: str | Path) -> list[str]:
    """A steelyard command, with the same interpreter and module path as this process."""
    from_here = "-m" in sys.orig_argv[1:3] and not sys.flags.safe_path
    return [sys.executable, *([] if from_here else ["-P"]), "-m", "steelyard", *map(str, arguments)]
