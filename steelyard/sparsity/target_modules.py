"""Which matrices of a model are masked: those of the products inside layers, less what a user leaves out.

Embeddings, norms, biases and the head are never masked. A matrix is named by a pattern over its name without the last
word, such as `layers.3.mlp.down`: the whole name (`layers.*.mlp.*`), a run of its parts (`mlp`, `attention.output`,
`layers.3`), or numbers of layers (`0`, `4-7`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

import torch

from steelyard import model
from steelyard.core.errors import UserError
from steelyard.core.recipe.model_section import GptConfig, LlamaConfig
from steelyard.model.modules import Linear

LAYERS = re.compile(r"(\d+)(?:-(\d+))?")


def maskable(config: GptConfig | LlamaConfig) -> dict[str, tuple[int, int]]:
    """The matrices that may be masked and their sizes, [out, in], in the order of the layers."""
    with torch.device("meta"):
        network = model.build(config)
    return {
        f"layers.{name}.weight": (module.out_features, module.in_features)
        for name, module in network.layers.named_modules()
        if isinstance(module, Linear)
    }


def chosen(
    names: Iterable[str], include: Sequence[str] = (), exclude: Sequence[str] = (), where: tuple[str, str] | None = None
) -> list[str]:
    """The names that `include` means, or all, without those that `exclude` means. Each pattern must mean something.

    `where` says what the two lists are called by the user.
    """
    known = list(names)
    called = where or ("--include", "--exclude")
    for patterns, place in zip((include, exclude), called, strict=True):
        for pattern in patterns:
            if not any(matches(name, pattern) for name in known):
                raise UserError(
                    f"{pattern} means no matrix of the model",
                    where=place,
                    hint="such as 0-3, mlp.down, attention or layers.*.mlp.up",
                )
    found = [
        name
        for name in known
        if (not include or any(matches(name, pattern) for pattern in include))
        and not any(matches(name, pattern) for pattern in exclude)
    ]
    if not found:
        raise UserError("no matrix is left to be masked", where=" and ".join(called))
    return found


def matches(name: str, pattern: str) -> bool:
    """Whether a pattern means the matrix of this name."""
    parts = name.removesuffix(".weight").split(".")
    numbers = LAYERS.fullmatch(pattern)
    if numbers:
        first = int(numbers[1])
        return first <= int(parts[1]) <= int(numbers[2] or first)
    pattern = pattern.removesuffix(".weight")
    runs = (".".join(parts[first:end]) for first in range(len(parts)) for end in range(first + 1, len(parts) + 1))
    return any(fnmatchcase(run, pattern) for run in runs)
