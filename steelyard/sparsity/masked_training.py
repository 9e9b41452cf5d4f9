"""Training weights under masks: N:M from scratch or from dense weights (SR-STE), and fine-tuning what was pruned.

`sr-ste` multiplies with the largest N of each M weights; the gradient goes straight through to all of them, and those
that are out are pulled to zero by `decay`, so that a choice once made becomes steady. `fixed` multiplies with what is
there: a weight that is zero gets no gradient, and so stays exactly zero under any optimizer.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from steelyard.checkpoint import formats
from steelyard.core.errors import UserError
from steelyard.core.recipe import Recipe
from steelyard.model import LanguageModel
from steelyard.model.modules import Linear
from steelyard.parallel.mesh import Mesh, alone
from steelyard.parallel.param_shards import ParamShard
from steelyard.parallel.world import World, gather_errors, raise_on_all_ranks, run_on_rank0
from steelyard.sparsity import frozen_base
from steelyard.sparsity.mask_prior import check_masks, held, refuse_fewer
from steelyard.sparsity.mask_sources import SPARSITY, Carried, Masks, carried, masks_of
from steelyard.sparsity.masked_linear import masked_sizes, replace_linears
from steelyard.sparsity.patterns import Pattern
from steelyard.sparsity.pruned_source import through
from steelyard.training import device as devices
from steelyard.training.engine import Engine
from steelyard.training.extension import Extension

MOVED = "say where they are now with sparsity.base=PATH"
OTHERS = (
    "name the weights they were found for in train.init_from; zeros that weights have already need no sparsity.mask"
)


class _OnMatrices(Extension):
    """What both ways share: other linear maps for the chosen matrices, and a word about it in each checkpoint."""

    def __init__(self, recipe: Recipe) -> None:
        assert recipe.sparsity is not None
        self.recipe, self.sparsity = recipe, recipe.sparsity
        self.names = masked_sizes(recipe)
        self.mesh: Mesh = alone()
        self.parts: list[ParamShard] = []

    def assembled(self, stages: dict[int, LanguageModel], parts: list[ParamShard], mesh: Mesh) -> None:
        """Find the masked weights among the parts."""
        self.mesh, self.parts = mesh, [part for part in parts if part.name in self.names]

    def state(self) -> dict[str, Any]:
        """Which matrices are masked, and how."""
        kept = {"include": self.sparsity.include, "exclude": self.sparsity.exclude}
        return {SPARSITY: {"method": self.sparsity.method, "pattern": self.sparsity.pattern, **kept}}

    def _share(self, sums: Tensor) -> float:
        """The share of the masked weights, over the world, that sums of (count, weights) speak of."""
        if self.mesh.world.size > 1:
            dist.all_reduce(sums)
        count, weights = sums.tolist()
        return float(count / weights)


class SrSte(_OnMatrices):
    """SR-STE: weights are trained, and the largest of each group count."""

    decay_1: Tensor | None = None

    def transform(self, model: LanguageModel) -> None:
        """Have the chosen matrices multiply with their largest weights."""
        if self.decay_1 is None:
            self.decay_1 = torch.zeros(1, device=devices.choose(self.recipe))
        pattern, decay_1 = Pattern.parse(self.sparsity.pattern), self.decay_1

        def make(linear: Linear, name: str) -> Linear:
            linear.product = _LargestProduct(linear.product, pattern, decay_1)
            return linear

        replace_linears(model, self.names, make)

    def begin_step(self, step: int, batch: int, loss_scale: float) -> None:
        """Count the pull once for the whole step: each micro-batch of the world adds its share."""
        assert self.decay_1 is not None
        micro_batches = batch // self.recipe.train.micro_batch
        self.decay_1.fill_(self.sparsity.decay * loss_scale / (micro_batches * self.mesh.context.size))


class FixedZeros(_OnMatrices):
    """Fine-tuning in which weights that are zero stay zero."""

    def transform(self, model: LanguageModel) -> None:
        """Have the zeros of the chosen matrices get no gradient."""

        def make(linear: Linear, name: str) -> Linear:
            linear.product = _KeptProduct(linear.product)
            return linear

        replace_linears(model, self.names, make)

    def start(self, engine: Engine, world: World) -> str:
        """Weights from elsewhere, with the zeros of the mask file, if one is named."""
        origin = self.recipe.train.init_from
        assert origin is not None, "the recipe was checked"
        brought = self._brought(origin, world)
        masks = self._masks(origin if brought is None else str(brought.base.path), world)
        if brought is not None:
            with gather_errors(world):
                refuse_fewer(brought.masks, self.names, self.recipe)
                how = self._start_under_masks(brought, engine)
        else:
            how = super().start(engine, world)
        with raise_on_all_ranks(world):
            if masks is not None:
                for part in self.parts:
                    part.tensor.mul_(held(masks.mask(part.name), part).to(part.tensor.device))
            zeros = self.metrics()["zeros"]
            if zeros == 0:
                raise UserError(
                    "the weights to keep the zeros of have none",
                    where=self.recipe.where("sparsity.method"),
                    hint="name pruned weights in train.init_from, or a mask file in sparsity.mask",
                )
        return f"{how}, {100 * zeros:.1f}% of the masked weights zero"

    def _brought(self, origin: str, world: World) -> Carried | None:
        """The masks that a run or a checkpoint brings, and their weights, which the first rank checks."""
        moved_to = self.sparsity.base
        brings = run_on_rank0(world, lambda: carried(origin, moved_to, hint=MOVED) is not None)
        with raise_on_all_ranks(world):
            brought = carried(origin, moved_to, checks=False, hint=MOVED) if brings else None
            if moved_to is not None and (brought is None or brought.identity is None):
                raise UserError(
                    f"{origin} has its weights with it, and is no run that learned masks for others",
                    where=self.recipe.where("sparsity.base"),
                    hint="leave it out",
                )
        return brought

    def _masks(self, weights: str, world: World) -> Masks | None:
        """The masks that the recipe names, which must have been found for these weights, if it is known for which."""
        if self.sparsity.mask is None:
            return None
        with raise_on_all_ranks(world):
            masks = masks_of(self.sparsity.mask)
            check_masks(masks, self.recipe, "sparsity.mask")
        if "sha256" in masks.base:
            found = frozen_base.identity_by_all(weights, world)
            with raise_on_all_ranks(world):
                frozen_base.refuse_others(masks.base, found, OTHERS)
        return masks

    def _start_under_masks(self, brought: Carried, engine: Engine) -> str:
        """Weights with the zeros of the masks that a run or a checkpoint brings."""
        pieces = engine.pieces(for_saving=False, with_optimizer=False)
        formats.load_pieces(through(brought), pieces, self.recipe.model)
        return (
            f"new run from the weights of {brought.base.path} under the {brought.how} of {self.recipe.train.init_from}"
        )

    def metrics(self) -> dict[str, float]:
        """The share of zeros, which does not change."""
        sums = torch.zeros(2, dtype=torch.float64, device=devices.choose(self.recipe))
        for part in self.parts:
            zeros = part.tensor.numel() - part.tensor.count_nonzero()
            sums += torch.stack([zeros, torch.full_like(zeros, part.tensor.numel())]).double() / part.copies
        return {"zeros": self._share(sums)}


class _LargestProduct:
    def __init__(self, product: Any, pattern: Pattern, decay_1: Tensor) -> None:
        self.product, self.pattern, self.decay_1 = product, pattern, decay_1

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        mask = self.pattern.keep_best(weight.detach().abs())
        kept: Tensor = _Largest.apply(weight, mask, self.decay_1)  # type: ignore[no-untyped-call]
        product: Tensor = self.product(x, kept, bias)
        return product


class _Largest(torch.autograd.Function):
    """Masked weights forward; backward, the gradient of all, and a pull on those that are out."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, mask: Tensor, decay_1: Tensor) -> Tensor:
        ctx.save_for_backward(weight, mask, decay_1)
        return weight * mask

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        weight, mask, decay_1 = ctx.saved_tensors
        return gradient + (decay_1 * weight * ~mask).to(gradient.dtype), None, None


class _KeptProduct:
    def __init__(self, product: Any) -> None:
        self.product = product

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        product: Tensor = self.product(x, weight * (weight.detach() != 0), bias)
        return product
