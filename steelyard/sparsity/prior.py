"""The mask that learning begins near: from a mask file, or where the weights themselves are not zero."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from steelyard.core.console import console
from steelyard.core.errors import UserError
from steelyard.core.recipe import Recipe
from steelyard.parallel.mesh import Mesh
from steelyard.parallel.parts import Part
from steelyard.sparsity.learned import masked_sizes
from steelyard.sparsity.masks import MaskFile


class Prior:
    """A mask for every masked weight."""

    def __init__(self, file: MaskFile | None, base: dict[str, str], recipe: Recipe) -> None:
        self.file, self.recipe = file, recipe
        self.zeros = 0.0
        if file is not None and file.base.get("sha256", base["sha256"]) != base["sha256"]:
            console.warn(f"the masks of {file.path} were found for other weights than those of {base['path']}")
        if file is not None:
            self._check(file)

    def mask(self, weight: Part) -> Tensor:
        """True where the prior keeps a weight, of the part that this rank holds."""
        mask = weight.tensor != 0 if self.file is None else self._from_file(self.file, weight)
        self.zeros += (mask.numel() - int(mask.sum())) / weight.copies
        return mask

    def _check(self, file: MaskFile) -> None:
        for name, size in masked_sizes(self.recipe).items():
            found = file.shapes.get(name)
            if found != size:
                what = "no mask" if found is None else f"a mask of {found}"
                raise UserError(
                    f"{file.path} has {what} for {name}, which is {size}",
                    where=self.recipe.where("sparsity.prior"),
                    mend="name a mask of this model, or leave such weights out with sparsity.exclude",
                )

    def _from_file(self, file: MaskFile, weight: Part) -> Tensor:
        mask = file.mask(weight.name)
        for dim, (first, length) in enumerate(zip(weight.offset, weight.tensor.shape, strict=True)):
            mask = mask.narrow(dim, first, length)
        return mask

    def refuse_if_empty(self, mesh: Mesh) -> None:
        """A prior that drops nothing says nothing: the user believes to have pruned weights and has not."""
        zeros = torch.tensor(self.zeros, dtype=torch.float64)
        if mesh.world.size > 1:
            zeros = zeros.to("cuda" if dist.get_backend() == "nccl" else "cpu")
            dist.all_reduce(zeros)
        if not zeros.item():
            raise UserError(
                "the prior is to come from the zeros of the weights, and they have none",
                where=self.recipe.where("sparsity.prior"),
                mend="name a mask file (steelyard prune --save mask writes one), or pruned weights as the base",
            )
