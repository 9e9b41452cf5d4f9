"""Selects the matrices to mask: linear modules and experts inside layers, filtered by the user's patterns.

Embeddings, norms, biases, routers and the head are never masked. `core/recipe/weight_names.py` describes the patterns.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from steelyard import model
from steelyard.core.errors import UserError
from steelyard.core.recipe.model_section import ModelConfig
from steelyard.core.recipe.weight_names import matches
from steelyard.model.experts import ExpertLinear
from steelyard.model.modules import Linear


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
