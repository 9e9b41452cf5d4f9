"""Selects the matrices to mask: linear modules and experts inside layers, filtered by the user's patterns.

Embeddings, norms, biases, routers and the head are never masked. A pattern matches a matrix's name without `.weight`, such as
`layers.3.mlp.down`: the whole name (`layers.*.mlp.*`), consecutive parts of it (`mlp`, `attention.output`,
`layers.3`), or layer numbers (`0`, `4-7`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

import torch

from steelyard import model
from steelyard.core.errors import UserError
from steelyard.core.recipe.model_section import ModelConfig
from steelyard.model.experts import ExpertLinear
from steelyard.model.modules import Linear

LAYERS = re.compile(r"(\d+)(?:-(\d+))?")


def maskable(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The weights that can be masked and their sizes, [out, in] or [experts, out, in], in layer order."""
    with torch.device("meta"):
        network = model.build(config)
    return {
        f"layers.{name}.weight": tuple(module.weight.shape)
        for name, module in network.layers.named_modules()
        if isinstance(module, (Linear, ExpertLinear))
    }


def chosen(
    names: Iterable[str], include: Sequence[str] = (), exclude: Sequence[str] = (), where: tuple[str, str] | None = None
) -> list[str]:
    """The names that match `include` (by default all) and not `exclude`. Each pattern must match a matrix.

    `where` gives the user's names of the two lists, for errors.
    """
    known = list(names)
    options = where or ("--include", "--exclude")
    for patterns, place in zip((include, exclude), options, strict=True):
        for pattern in patterns:
            if not any(matches(name, pattern) for name in known):
                raise UserError(
                    f"{pattern} matches no matrix of the model",
                    where=place,
                    hint="use a pattern such as 0-3, mlp.down, attention or layers.*.mlp.up",
                )
    matched = [
        name
        for name in known
        if (not include or any(matches(name, pattern) for pattern in include))
        and not any(matches(name, pattern) for pattern in exclude)
    ]
    if not matched:
        raise UserError("no matrix remains to be masked", where=" and ".join(options))
    return matched


def matches(name: str, pattern: str) -> bool:
    """Whether a pattern matches the name of a matrix."""
    parts = name.removesuffix(".weight").split(".")
    numbers = LAYERS.fullmatch(pattern)
    if numbers:
        first = int(numbers[1])
        return first <= int(parts[1]) <= int(numbers[2] or first)
    pattern = pattern.removesuffix(".weight")
    runs = (".".join(parts[first:end]) for first in range(len(parts)) for end in range(first + 1, len(parts) + 1))
    return any(fnmatchcase(run, pattern) for run in runs)
