"""The prior of mask learning: the masks of a file, run or checkpoint, or the nonzero weights of the base."""

from __future__ import annotations

from collections.abc import Container

import torch
import torch.distributed as dist
from torch import Tensor

from steelyard.core.console import console
from steelyard.core.errors import UserError
from steelyard.core.recipe import Recipe
from steelyard.parallel.mesh import Mesh
from steelyard.parallel.param_shards import ParamShard
from steelyard.sparsity.mask_sources import Masks
from steelyard.sparsity.masked_linear import masked_sizes


class MaskPrior:
    """A mask for every masked weight."""

    def __init__(self, masks: Masks | None, base: dict[str, str], recipe: Recipe) -> None:
        self.masks, self.recipe = masks, recipe
        self.zeros = 0.0
        if masks is None:
            return
        if masks.base.get("sha256", base["sha256"]) != base["sha256"]:
            console.warn(f"the masks of {masks.path} were made for other weights than those of {base['path']}")
        check_masks(masks, recipe, "sparsity.prior")

    def mask(self, weight: ParamShard) -> Tensor:
        """True where the prior keeps a weight, for this rank's shard."""
        mask = weight.tensor != 0 if self.masks is None else local_shard(self.masks.mask(weight.name), weight)
        self.zeros += (mask.numel() - int(mask.sum())) / weight.copies
        return mask

    def refuse_if_empty(self, mesh: Mesh) -> None:
        """Refuse a prior that prunes nothing: the user assumes pruned weights, but they are dense."""
        zeros = torch.tensor(self.zeros, dtype=torch.float64)
        if mesh.world.size > 1:
            zeros = zeros.to("cuda" if dist.get_backend() == "nccl" else "cpu")
            dist.all_reduce(zeros)
        if not zeros.item():
            raise UserError(
                "sparsity.prior uses the zeros of the weights, but they have none",
                where=self.recipe.where("sparsity.prior"),
                hint="give a mask file (steelyard prune --save mask writes one), or pruned weights as the base",
            )


def check_masks(masks: Masks, recipe: Recipe, key: str) -> None:
    """Refuse masks that lack a matrix that the recipe selects."""
    known = set(masks.names())
    for name, size in masked_sizes(recipe).items():
        shape = masks.shape(name) if name in known else None
        if shape != size:
            what = "no mask" if shape is None else f"a mask of {shape}"
            raise UserError(
                f"{masks.path} has {what} for {name}, which is {size}",
                where=recipe.where(key),
                hint="give masks of this model, or exclude such weights with sparsity.exclude",
            )


def refuse_fewer(masks: Masks, chosen: Container[str], recipe: Recipe) -> None:
    """Refuse masks of which the recipe selects only some: the other matrices would become dense again."""
    dropped = [name for name in masks.names() if name not in chosen]
    if dropped:
        key = "sparsity.include" if recipe.sparsity is not None and recipe.sparsity.include else "sparsity.exclude"
        raise UserError(
            f"{masks.path} has masks that the recipe does not select, {dropped[0].removesuffix('.weight')} and "
            f"{len(dropped) - 1} more: those matrices would become dense again",
            where=recipe.where(key),
            hint="select the same matrices as in the masks",
        )


def local_shard(whole: Tensor, shard: ParamShard) -> Tensor:
    """This rank's shard of a whole tensor that has the shape of a parameter."""
    for dim, (first, length) in enumerate(zip(shard.offset, shard.tensor.shape, strict=True)):
        whole = whole.narrow(dim, first, length)
    return whole
