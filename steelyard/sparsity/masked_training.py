"""Training weights under masks: SR-STE for N:M from scratch or from dense weights, and fine-tuning of pruned weights.

`sr-ste` multiplies with the largest N of each M weights. The gradient reaches all of them (straight-through), and
`decay` pulls the pruned ones to zero, which stabilises the masks. `fixed` keeps zeros: a weight that is zero gets no
gradient, so it stays exactly zero with any optimizer.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from steelyard.checkpoint import formats
from steelyard.core.errors import UserError
from steelyard.core.recipe import Recipe
from steelyard.model import LanguageModel
from steelyard.model.experts import ExpertLinear
from steelyard.model.modules import Linear
from steelyard.parallel.mesh import Mesh, alone
from steelyard.parallel.param_shards import ParamShard
from steelyard.parallel.world import World, gather_errors, raise_on_all_ranks, run_on_rank0
from steelyard.sparsity import frozen_base
from steelyard.sparsity.mask_prior import check_masks, local_shard, refuse_fewer
from steelyard.sparsity.mask_sources import SPARSITY, MaskedCheckpoint, Masks, masked_checkpoint, masks_of
from steelyard.sparsity.masked_linear import masked_sizes, replace_linears
from steelyard.sparsity.patterns import Pattern, place_hash
from steelyard.sparsity.pruned_source import through
from steelyard.training import device as devices
from steelyard.training.engine import Engine
from steelyard.training.extension import Extension

MOVED = "give their current path with sparsity.base=PATH"
OTHERS = "set train.init_from to the weights that the masks were made for; weights with zeros need no sparsity.mask"


class MaskedMatrices(Extension):
    """Common parts of the methods: the chosen matrices, and their settings in each checkpoint."""

    def __init__(self, recipe: Recipe) -> None:
        assert recipe.sparsity is not None
        self.recipe, self.sparsity = recipe, recipe.sparsity
        self.names = masked_sizes(recipe)
        self.mesh: Mesh = alone()
        self.param_shards: list[ParamShard] = []

    def parallelized(self, stages: dict[int, LanguageModel], param_shards: list[ParamShard], mesh: Mesh) -> None:
        """Collect the masked weights among the parameter shards."""
        self.mesh, self.param_shards = mesh, [shard for shard in param_shards if shard.name in self.names]

    def state(self) -> dict[str, Any]:
        """The method, the pattern and the masked matrices."""
        targets = {"include": self.sparsity.include, "exclude": self.sparsity.exclude}
        return {SPARSITY: {"method": self.sparsity.method, "pattern": self.sparsity.pattern, **targets}}

    def zeros_2(self) -> Tensor:
        """This rank's number of zeros in the masked weights, and of weights; shards of several ranks are split."""
        sums_2 = torch.zeros(2, dtype=torch.float64, device=devices.choose(self.recipe))
        for shard in self.param_shards:
            zeros = shard.tensor.numel() - shard.tensor.count_nonzero()
            sums_2 += torch.stack([zeros, torch.full_like(zeros, shard.tensor.numel())]).double() / shard.copies
        return sums_2

    def mask_file(self, weights: str, world: World) -> Masks | None:
        """The masks of `sparsity.mask`; if they record their base, it must be these weights."""
        if self.sparsity.mask is None:
            return None
        with raise_on_all_ranks(world):
            masks = masks_of(self.sparsity.mask)
            check_masks(masks, self.recipe, "sparsity.mask")
        if "sha256" in masks.base:
            identity = frozen_base.identity_by_all(weights, world)
            with raise_on_all_ranks(world):
                frozen_base.refuse_others(masks.base, identity, OTHERS)
        return masks


class SrSte(MaskedMatrices):
    """SR-STE: all weights are trained, and products use the largest of each group."""

    decay_1: Tensor | None = None

    def transform(self, model: LanguageModel) -> None:
        """Make the chosen matrices multiply with their largest weights."""
        if self.decay_1 is None:
            self.decay_1 = torch.zeros(1, device=devices.choose(self.recipe))
        pattern, decay_1 = Pattern.parse(self.sparsity.pattern), self.decay_1

        def make(linear: Linear, name: str) -> Linear:
            linear.product = _LargestProduct(linear, pattern, decay_1)
            return linear

        replace_linears(model, self.names, make)

    def begin_step(self, step: int, batch: int, loss_scale: float) -> None:
        """Set the decay so that it counts once per step: each micro-batch of the world adds its share."""
        assert self.decay_1 is not None
        micro_batches = batch // self.recipe.train.micro_batch
        self.decay_1.fill_(self.sparsity.decay * loss_scale / (micro_batches * self.mesh.context.size))


class FixedZeros(MaskedMatrices):
    """Fine-tuning that keeps zero weights at zero."""

    def transform(self, model: LanguageModel) -> None:
        """Block the gradient of zeros in the chosen matrices."""

        def make(linear: Linear | ExpertLinear, name: str) -> nn.Module:
            linear.product = _KeptProduct(linear.product)
            return linear

        replace_linears(model, self.names, make)

    def start(self, engine: Engine, world: World) -> str:
        """Load the weights, and apply the mask file if one is set."""
        origin = self.recipe.train.init_from
        assert origin is not None, "the recipe was checked"
        attached = self._attached_masks(origin, world)
        masks = self.mask_file(origin if attached is None else str(attached.base.path), world)
        if attached is not None:
            with gather_errors(world):
                refuse_fewer(attached.masks, self.names, self.recipe)
                how = self._start_under_masks(attached, engine)
        else:
            how = super().start(engine, world)
        with raise_on_all_ranks(world):
            if masks is not None:
                for shard in self.param_shards:
                    shard.tensor.mul_(local_shard(masks.mask(shard.name), shard).to(shard.tensor.device))
            zeros = self.metrics()["zeros"]
            if zeros == 0:
                raise UserError(
                    'sparsity.method is "fixed", but the weights have no zeros',
                    where=self.recipe.where("sparsity.method"),
                    hint="set train.init_from to pruned weights, or sparsity.mask to a mask file",
                )
        return f"{how}, {100 * zeros:.1f}% of the masked weights are zero"

    def _attached_masks(self, origin: str, world: World) -> MaskedCheckpoint | None:
        """The masks of a run or checkpoint and their weights, which rank 0 verifies."""
        moved_to = self.sparsity.base
        has_masks = run_on_rank0(world, lambda: masked_checkpoint(origin, moved_to, hint=MOVED) is not None)
        with raise_on_all_ranks(world):
            attached = masked_checkpoint(origin, moved_to, checks=False, hint=MOVED) if has_masks else None
            if moved_to is not None and (attached is None or attached.identity is None):
                raise UserError(
                    f"sparsity.base is set, but {origin} has its own weights and is not a mask-learning run",
                    where=self.recipe.where("sparsity.base"),
                    hint="remove the key",
                )
        return attached

    def _start_under_masks(self, attached: MaskedCheckpoint, engine: Engine) -> str:
        """Load the weights with the masks of a run or checkpoint applied."""
        pieces = engine.state_shards(for_saving=False, with_optimizer=False)
        formats.load_shards(through(attached), pieces, self.recipe.model)
        return (
            f"new run from the weights of {attached.base.path} with the {attached.how} of {self.recipe.train.init_from}"
        )

    def metrics(self) -> dict[str, float]:
        """The share of zeros, which is constant."""
        sums_2 = self.zeros_2()
        if self.mesh.world.size > 1:
            dist.all_reduce(sums_2)
        zeros, weights = sums_2.tolist()
        return {"zeros": zeros / weights}


class _LargestProduct:
    def __init__(self, linear: Linear, pattern: Pattern, decay_1: Tensor) -> None:
        self.linear, self.product, self.pattern, self.decay_1 = linear, linear.product, pattern, decay_1

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        dim, index, _ = self.linear.shard
        rows, columns = weight.shape
        first = (index * rows, 0) if dim == 0 else (0, index * columns)
        mask = self.pattern.keep_best(weight.detach().abs(), place_hash(weight.shape, weight.device, first))
        masked: Tensor = _Largest.apply(weight, mask, self.decay_1)  # type: ignore[no-untyped-call]
        product: Tensor = self.product(x, masked, bias)
        return product


class _Largest(torch.autograd.Function):
    """Forward: masked weights. Backward: the gradient of all weights, plus decay of the pruned ones."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, mask: Tensor, decay_1: Tensor) -> Tensor:
        ctx.save_for_backward(weight, mask, decay_1)
        return weight * mask

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        weight, mask, decay_1 = ctx.saved_tensors
        return gradient + (decay_1 * weight * ~mask).to(gradient.dtype), None, None


class _KeptProduct:
    """A product without gradients of zeros. The third argument is a bias, or the tokens of each expert."""

    def __init__(self, product: Any) -> None:
        self.product = product

    def __call__(self, x: Tensor, weight: Tensor, other: Tensor | None) -> Tensor:
        product: Tensor = self.product(x, weight * (weight.detach() != 0), other)
        return product
