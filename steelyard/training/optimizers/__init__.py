"""One module per optimizer, named like `optim.name`. Each has a function `build(params, optim, stage)`.

A new optimizer is such a module and a line in `core/recipe/optimizers.py`.
"""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

import torch
from torch import Tensor

from steelyard.core.recipe.optim_section import OptimSection
from steelyard.parallel.mesh import MeshAxis
from steelyard.parallel.param_shards import ParamShard


class OptimParam(NamedTuple):
    """A trained parameter: its shard, the tensor to update, and its param-group options."""

    shard: ParamShard
    tensor: Tensor
    """Empty if this rank holds no row of the parameter."""
    weight_decay: float
    rate: float
    """Factor on the learning rate."""


def build(params: list[OptimParam], optim: OptimSection, stage: MeshAxis) -> torch.optim.Optimizer:
    """The recipe's optimizer for the parameters of a rank; `stage` are the ranks that hold their other shards."""
    module = importlib.import_module(f"{__name__}.{optim.name.replace('-', '_')}")
    built: torch.optim.Optimizer = module.build(params, optim, stage)
    return built


def param_groups(params: list[OptimParam], **options: Any) -> list[dict[str, Any]]:
    """Param groups of equal options, at least one. Empty shards are left out."""
    by_options: dict[tuple[float, float], list[Tensor]] = {}
    for each in params:
        if each.tensor.numel():
            by_options.setdefault((-each.weight_decay, each.rate), []).append(each.tensor)
    groups = sorted(by_options.items(), key=lambda item: item[0]) or [((0.0, 1.0), [])]
    return [{"params": tensors, "weight_decay": -decay, "rate": rate, **options} for (decay, rate), tensors in groups]
