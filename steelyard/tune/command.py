"""A command with placeholders, as an argument list: values go into words, and no shell sees any of them."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

STORAGE = "STEELYARD_TUNE_STORAGE"  # Where the study is, with a password perhaps: no business of a trial.
OWN = ("trial", "folder")  # What every trial has: its number, and a folder of its own.
_NAME = r"[A-Za-z_][A-Za-z0-9_.-]*"
# Braces around a name count, and no others: JSON inside JSON ends in two that are none of ours.
_PLACEHOLDER = re.compile(rf"(?<!\{{)\{{(?P<braced>\{{{_NAME}\}})\}}|\{{(?P<name>{_NAME})\}}")


def words(template: str) -> list[str]:
    """The words of a command, as a shell would split it; raises ValueError for an open quote."""
    return shlex.split(template)


def placeholders(template: Sequence[str]) -> set[str]:
    """The names in braces. A name in doubled braces is itself in braces, and what is no name (JSON) is left alone."""
    return {match["name"] for word in template for match in _PLACEHOLDER.finditer(word) if match["name"]}


def filled(template: Sequence[str], values: Mapping[str, Any]) -> list[str]:
    """The words with their values. A value never becomes several words."""

    def value(match: re.Match[str]) -> str:
        return match["braced"] or shown(values[match["name"]])

    return [_PLACEHOLDER.sub(value, word) for word in template]


def shown(value: Any) -> str:
    """A value as a command line has it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def steelyard(*arguments: str | Path) -> list[str]:
    """A command of this very package, found the way this process found it."""
    from_here = "-m" in sys.orig_argv[1:3] and not sys.flags.safe_path
    return [sys.executable, *([] if from_here else ["-P"]), "-m", "steelyard", *map(str, arguments)]
