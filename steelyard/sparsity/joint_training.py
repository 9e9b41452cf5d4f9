"""Joint training of weights and masks (`sparsity.method = "joint"`): N:M weights that follow the dense model.

The model computes with its weights as they are. After every update the weights outside the masks are scaled down, so
that one that no gradient changes falls linearly from its value to exactly zero at the step `freeze_after`. Until then
the masks are chosen again every `mask_every` steps: the N most important of each M weights. A weight that its gradients
hold up against the scaling returns to the masks. Afterwards the masks stay, and weights outside them are set to zero
after every update. Only this rank's parameter shards are changed, never the forward pass, and a shard has whole groups,
so every layout, optimizer and precision computes the same rule.

Importance is |w|, or |w| times the norm of its column of the gradient. The squared norm of a column is about the sum
over tokens of (input of the column)^2 times the squared gradient of the outputs, so it is Wanda's score with tokens
weighted by what they matter to the loss, and costs no pass of its own.

Distillation needs the dense model while the weights change: a frozen copy on the same layout (`teacher`), in the
precision of the products. Checkpoints hold the weights and masks, and path and hash of the teacher's weights.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from steelyard.checkpoint import TensorShard
from steelyard.core.recipe import Recipe
from steelyard.model import LanguageModel
from steelyard.parallel.mesh import Mesh
from steelyard.parallel.parallelize import ParallelModel, parallelize
from steelyard.parallel.param_shards import ParamShard
from steelyard.parallel.world import World
from steelyard.sparsity import frozen_base
from steelyard.sparsity.distillation import DistillationExtension, DistillationLoss
from steelyard.sparsity.mask_prior import local_shard
from steelyard.sparsity.mask_sources import JOINT_MASK, SPARSITY
from steelyard.sparsity.masked_linear import freeze
from steelyard.sparsity.masked_training import MOVED, MaskedMatrices
from steelyard.sparsity.patterns import Pattern, place_hash
from steelyard.training import device as devices
from steelyard.training.engine import Engine

NO_GRADIENT = 1e-6  # The start of the sums: weights whose columns have no gradient are ranked by magnitude.


class JointTraining(MaskedMatrices, DistillationExtension):
    """Trains all weights, and scales those outside the masks to zero."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.pattern = Pattern.parse(self.sparsity.pattern)
        self.last_scaled = max(1, round(self.sparsity.freeze_after * recipe.train.steps))
        self.step = 0
        self.base: dict[str, str] = {}
        self.kept: dict[ParamShard, Tensor] = {}
        self.columns: dict[ParamShard, Tensor] = {}
        """For the columns of whole matrices, sums of their share of the squared gradient at each choice."""
        self.changed = torch.zeros((), dtype=torch.float64, device=devices.choose(recipe))
        """Weights of this rank that entered or left the masks since the last record."""

    def parallelized(self, stages: dict[int, LanguageModel], param_shards: list[ParamShard], mesh: Mesh) -> None:
        """Allocate the masks of this rank's shards."""
        super().parallelized(stages, param_shards, mesh)
        self.kept = {shard: torch.ones_like(shard.tensor, dtype=torch.bool) for shard in self.param_shards}
        if self.sparsity.importance == "gradient":
            self.columns = {shard: shard.tensor.new_full(shard.shape[1:], NO_GRADIENT) for shard in self.param_shards}

    def start(self, engine: Engine, world: World) -> str:
        """Load the weights and masks of a file, and build the teacher. Other masks are chosen after the first step."""
        how = super().start(engine, world)
        origin = self.recipe.train.init_from
        assert origin is not None, "the recipe was checked"
        masks = self.mask_file(origin, world)
        for shard, kept in self.kept.items():
            if masks is not None:
                kept.copy_(local_shard(masks.mask(shard.name), shard))
        self._build_teacher(self.sparsity.base or origin, None, engine, world)
        taught = f", distilled from {self.base['path']}" if self.base else ""
        return how + taught

    def resumed(self, engine: Engine, world: World, state: dict[str, Any]) -> None:
        """Load the teacher from the weights that the checkpoint refers to; masks are in the checkpoint."""
        about = state[SPARSITY]
        recorded = about.get("base") or None
        origin = self.sparsity.base or (recorded or {}).get("path") or self.recipe.train.init_from
        self._build_teacher(str(origin), recorded, engine, world)
        self.restore_distilled(about, world)
        if world.is_rank0:
            self.changed.fill_(about["changed"])

    def begin_step(self, step: int, batch: int, loss_scale: float) -> None:
        """Note the step, which the scale of the masked weights depends on."""
        self.step = step

    @torch.no_grad()
    def before_update(self, engine: Engine) -> None:
        """Add the squared gradient of each column, as a share of its matrix, if masks are chosen after this step."""
        if not self.columns or not self._chooses():
            return
        sums = []
        for shard, columns in self.columns.items():
            sums.append(torch.zeros_like(columns))
            if shard.gradient is not None:
                here = sums[-1].narrow(0, shard.offset[1], shard.tensor.shape[1])
                here.copy_(shard.gradient.float().square().sum(dim=0) / shard.copies)
        whole = torch.cat(sums)
        if self.mesh.stage.size > 1:
            dist.all_reduce(whole, group=self.mesh.stage.group)
        for columns, squares in zip(self.columns.values(), whole.split([len(each) for each in sums]), strict=True):
            columns += (squares / squares.mean()).nan_to_num(0.0, 0.0, 0.0)  # A skipped step adds nothing.

    @torch.no_grad()
    def after_update(self, engine: Engine) -> None:
        """Choose the masks again if it is time, and scale the weights outside them."""
        before, scale, chooses = self._scale(self.step - 1), self._scale(self.step), self._chooses()
        for shard, kept in self.kept.items():
            if chooses:
                chosen = self._most_important(shard)
                if self.step > 1:
                    self.changed += (chosen != kept).sum().double() / shard.copies
                kept.copy_(chosen)
            if scale > 0:
                shard.tensor.copy_(torch.where(kept, shard.tensor, shard.tensor * (scale / before)))
            else:
                shard.tensor.masked_fill_(~kept, 0.0)
        engine.optimizer.copy_weights_to_host()

    def metrics(self) -> dict[str, float]:
        """The scale of the masked weights, the shares of zeros and of weights whose mask changed."""
        sums_5 = torch.zeros(5, dtype=torch.float64, device=self.changed.device)
        sums_5[:2] += self.zeros_2()
        sums_5[2] = self.changed
        if self.distillation is not None:
            sums_5[3:] += self.distillation.sums_2
            self.distillation.sums_2.zero_()
        self.changed.zero_()
        if self.mesh.world.size > 1:
            dist.all_reduce(sums_5)
        zeros, weights, changed, divergence, tokens = sums_5.tolist()
        distilled = {} if self.distillation is None else {"distill_loss": divergence / max(1, tokens)}
        return distilled | {
            "zeros": zeros / weights,
            "mask_changed": changed / weights,
            "mask_scale": self._scale(self.step),
        }

    def state_shards(self) -> dict[str, TensorShard]:
        """The masks, one byte per weight, and the sums of columns."""
        masks = {
            f"masks.{shard.name}.{JOINT_MASK}": TensorShard(kept.view(torch.uint8), shard.shape, shard.offset)
            for shard, kept in self.kept.items()
            if kept.numel()
        }
        columns = {f"masks.{shard.name}.columns": TensorShard.whole(each) for shard, each in self.columns.items()}
        return masks | columns

    def state(self) -> dict[str, Any]:
        """The method, the pattern, the matrices, the teacher's weights, and whether the masked weights are zero."""
        changed = self.changed.clone()
        if self.mesh.world.size > 1:
            dist.all_reduce(changed)
        more = {"base": self.base, "finished": self._scale(self.step) == 0, "changed": changed.item()}
        return {SPARSITY: super().state()[SPARSITY] | more | self.distilled(self.mesh)}

    def _scale(self, step: int) -> float:
        """The factor of an otherwise constant weight outside the masks, after a step."""
        return max(0.0, 1 - step / self.last_scaled)

    def _chooses(self) -> bool:
        """Whether the masks are chosen after this step: the first, every `mask_every`, and when they begin to stay."""
        is_due = self.step in (1, self.last_scaled) or self.step % self.sparsity.mask_every == 0
        return is_due and self._scale(self.step - 1) > 0 and self.sparsity.mask is None

    def _most_important(self, shard: ParamShard) -> Tensor:
        row, column = shard.offset
        scores = shard.tensor.abs()
        if shard in self.columns:
            scores *= self.columns[shard].narrow(0, column, shard.tensor.shape[1]).sqrt()
        return self.pattern.keep_best(scores, place_hash(scores.shape, scores.device, (row, column)))

    def _build_teacher(self, path: str, recorded: dict[str, Any] | None, engine: Engine, world: World) -> None:
        """With distillation, build the dense model and load its weights; refuse weights other than the recorded."""
        if not self.sparsity.distill:
            return
        teacher = frozen_copy(engine)
        pieces = {
            f"model.{shard.name}": TensorShard(shard.tensor, shard.shape, shard.offset)
            for shard in teacher.param_shards
            if shard.tensor.numel()
        }
        self.base = frozen_base.load(path, recorded, pieces, self.recipe.model, world, MOVED)
        weight, temperature = self.sparsity.distill, self.sparsity.distill_temperature
        self.distillation = DistillationLoss(weight, temperature, engine.device, teacher=teacher)


def frozen_copy(engine: Engine) -> ParallelModel:
    """A frozen model on the layout of an engine, for forward passes; its weights are not loaded yet."""
    recipe, device = engine.recipe, engine.device
    dtype, compiled = devices.compute_dtype(recipe.train.precision, device), devices.compiles(recipe, device)
    copy = parallelize(recipe, engine.mesh, device, dtype, compiled, freeze)
    for model in copy.stages.values():
        model.eval()
        if isinstance(model, FSDPModule):  # The loss needs the head after the forward pass.
            model.set_reshard_after_forward(False, recurse=False)
    return copy
