"""Patterns that select weights of layers by their names.

A pattern matches a name without `.weight`, such as `layers.3.mlp.down`: the whole name (`layers.*.mlp.*`), consecutive
parts of it (`mlp`, `attention.output`, `layers.3`), or layer numbers (`0`, `4-7`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from fnmatch import fnmatchcase

LAYERS = re.compile(r"(\d+)(?:-(\d+))?")


def matches(name: str, pattern: str) -> bool:
    """Whether a pattern matches the name of a weight."""
    parts = name.removesuffix(".weight").split(".")
    numbers = LAYERS.fullmatch(pattern)
    if numbers:
        first = int(numbers[1])
        return first <= int(parts[1]) <= int(numbers[2] or first)
    return any(fnmatchcase(run, pattern.removesuffix(".weight")) for run in runs_of(name))


def runs_of(name: str) -> Iterator[str]:
    """All runs of consecutive parts of a name, such as `mlp`, `down` and `mlp.down`."""
    parts = name.removesuffix(".weight").split(".")
    return (".".join(parts[first:end]) for first in range(len(parts)) for end in range(first + 1, len(parts) + 1))
