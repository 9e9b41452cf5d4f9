"""The training extension for `[sparsity]`: mask learning, SR-STE, joint training or fixed zeros."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from steelyard import checkpoint
from steelyard.checkpoint import TensorShard, formats
from steelyard.core.errors import UserError
from steelyard.core.recipe import Recipe
from steelyard.core.recipe.sparsity_section import SparsitySection
from steelyard.model import LanguageModel
from steelyard.parallel.mesh import Mesh, alone
from steelyard.parallel.param_shards import ParamShard
from steelyard.parallel.world import World, gather_errors, raise_on_all_ranks, run_on_rank0
from steelyard.sparsity import frozen_base, gumbel, masked_linear
from steelyard.sparsity.distillation import DistillationExtension, DistillationLoss
from steelyard.sparsity.joint_training import JointTraining
from steelyard.sparsity.mask_prior import MaskPrior, local_shard, refuse_fewer
from steelyard.sparsity.mask_sources import LOGITS, SPARSITY, RunMasks, masks_of
from steelyard.sparsity.masked_training import MOVED, FixedZeros, SrSte
from steelyard.sparsity.maskllm import MaskLlm, masks_in
from steelyard.training import device as devices
from steelyard.training.engine import Engine
from steelyard.training.extension import Extension
from steelyard.training.optimizer import ParamGroupOptions

FROM_WEIGHTS = "weights"


def extension(recipe: Recipe) -> Extension | None:
    """The extension for a recipe's `[sparsity]`."""
    if recipe.sparsity is None:
        return None
    if recipe.sparsity.method == "learned":
        return LearnedMasks(recipe, recipe.sparsity)
    methods = {"sr-ste": SrSte, "joint": JointTraining, "fixed": FixedZeros}
    return methods[recipe.sparsity.method](recipe)


class LearnedMasks(DistillationExtension):
    """Mask learning: trains logits over masks. The weights are frozen; checkpoints hold a reference to their base."""

    needs_samples = True

    def __init__(self, recipe: Recipe, sparsity: SparsitySection) -> None:
        self.recipe, self.sparsity = recipe, sparsity
        self.names = masked_linear.masked_sizes(recipe)
        self.base: dict[str, str] = {}
        self.mesh: Mesh = alone()
        self.anneal: masked_linear.AnnealState | None = None
        self.numbers = (1.0, 1.0, 0.0)
        self.masked: list[LogitsShard] = []

    def transform(self, model: LanguageModel) -> None:
        """Freeze the model and replace linear modules of its layers by masked ones."""
        if self.anneal is None:
            self.anneal = masked_linear.anneal_state_of(self.sparsity, devices.choose(self.recipe))
        masked_linear.freeze(model)
        masked_linear.put_masks(model, self.names, self.recipe.train.seed, self.anneal)
        if self.sparsity.distill:
            weight, temperature = self.sparsity.distill, self.sparsity.distill_temperature
            self.distillation = DistillationLoss(weight, temperature, devices.choose(self.recipe), anneal=self.anneal)

    def parallelized(self, stages: dict[int, LanguageModel], param_shards: list[ParamShard], mesh: Mesh) -> None:
        """Collect the logits among the parameter shards, each with its weight."""
        self.mesh = mesh
        by_name = {shard.name: shard for shard in param_shards}
        self.masked = [
            LogitsShard(shard, by_name[_weight_of(shard.name)]) for shard in param_shards if shard.name.endswith(LOGITS)
        ]

    def initial_std(self, shard: ParamShard) -> float | None:
        """Logits start near zero."""
        return self.sparsity.std

    def param_group_options(self, shard: ParamShard) -> ParamGroupOptions:
        """Logits have their own learning rate and weight decay."""
        own, default = self.sparsity.learning_rate, self.recipe.optim.learning_rate
        rate = self.sparsity.learning_rate_multiplier if own is None else own / default
        return ParamGroupOptions(rate, self.sparsity.weight_decay)

    def start(self, engine: Engine, world: World) -> str:
        """Load weights from the base, and logits from an earlier mask-learning run or the prior."""
        origin = self.recipe.train.init_from
        saved = None if origin is None else run_on_rank0(world, lambda: learned_checkpoint(origin))
        theirs = _maskllm_logits(origin) if origin is not None and saved is None else None
        if theirs is not None:
            self._load_base(self.sparsity.base or str(origin), None, engine, world)
            with raise_on_all_ranks(world):
                self._take_logits(theirs)
            return f"new run from MaskLLM's mask logits in {origin}"
        if saved is None:
            with raise_on_all_ranks(world):
                path = self._only_base()
            self._load_base(path, None, engine, world)
            with raise_on_all_ranks(world):
                prior = self._add_prior(world)
            return f"new run that learns masks for {self.base['path']}, {prior}"
        with gather_errors(world):
            refuse_fewer(RunMasks(saved), self.names, self.recipe)
            checkpoint.load(saved, engine.state_shards(for_saving=False, with_optimizer=False) | self.state_shards())
        self._load_recorded_base(saved.state, engine, world)
        return f"new run from the mask logits of {saved.path}"

    def resumed(self, engine: Engine, world: World, state: dict[str, Any]) -> None:
        """Load weights from the base that the checkpoint refers to."""
        self.restore_distilled(state[SPARSITY], world)
        self._load_recorded_base(state, engine, world)

    def begin_step(self, step: int, batch: int, loss_scale: float) -> None:
        """Set scale, temperature and weight_reg, interpolated linearly between the first and the last step.

        The regulariser counts once per step: each micro-batch of the world adds its share, which context-parallel ranks
        split.
        """
        share = (step - 1) / max(1, self.recipe.train.steps - 1)
        scale, temperature, weight_reg = (
            first * (1 - share) + last * share
            for first, last in (self.sparsity.scale, self.sparsity.temperature, self.sparsity.weight_reg)
        )
        self.numbers = (scale, temperature, weight_reg)
        micro_batches = batch // self.recipe.train.micro_batch
        factor = loss_scale / (micro_batches * self.mesh.context.size)
        assert self.anneal is not None
        values = torch.tensor([scale, temperature, weight_reg * factor])
        self.anneal.anneal_3.copy_(values, non_blocking=True)
        self.anneal.step_2.copy_(torch.tensor(gumbel.draw_of_step(step), dtype=torch.int32), non_blocking=True)

    def metrics(self) -> dict[str, float]:
        """Mean largest mask probability, and shares of masks that changed since the last record or left the prior."""
        scale, temperature, weight_reg = self.numbers
        sums = torch.zeros(6, dtype=torch.float64, device=devices.choose(self.recipe))
        for masked in self.masked:
            sums[:4] += masked.statistics(scale)
        if self.distillation is not None:
            sums[4:] += self.distillation.sums_2
            self.distillation.sums_2.zero_()
        if self.mesh.world.size > 1:
            dist.all_reduce(sums)
        certain, changed, away, groups, divergence, tokens = sums.tolist()
        distilled = {} if self.distillation is None else {"distill_loss": divergence / max(1, tokens)}
        return distilled | {
            "mask_max_probability": certain / groups,
            "mask_changed": changed / groups,
            "mask_from_prior": away / groups,
            "temperature": temperature,
            "scale": scale,
            "weight_reg": weight_reg,
        }

    def saves(self, shard: ParamShard) -> bool:
        """Only logits are saved; frozen weights are in the base."""
        return shard.parameter.requires_grad

    def state_shards(self) -> dict[str, TensorShard]:
        """Each group's mask at the last record and in the prior, for the metrics."""
        return {name: piece for masked in self.masked for name, piece in masked.state_shards().items()}

    def state(self) -> dict[str, Any]:
        """The pattern of the masks, and the base weights."""
        about: dict[str, Any] = {"method": "learned", "pattern": self.sparsity.pattern, "base": self.base}
        return {SPARSITY: about | self.distilled(self.mesh)}

    def _only_base(self) -> str:
        origin, base = self.recipe.train.init_from, self.sparsity.base
        if origin is not None and base is not None and origin != base:
            raise UserError(
                f"sparsity.base is {base}, but train.init_from = {origin} is not a mask-learning run",
                where=self.recipe.where("train.init_from"),
                hint="set only one of the two keys to the weights",
            )
        path = base or origin
        assert path is not None, "the recipe was checked"
        return path

    def _load_recorded_base(self, state: dict[str, Any], engine: Engine, world: World) -> None:
        recorded = state.get(SPARSITY, {}).get("base", {})
        self._load_base(self.sparsity.base or str(recorded.get("path", "")), recorded, engine, world)

    def _load_base(self, path: str, recorded: dict[str, Any] | None, engine: Engine, world: World) -> None:
        """Load the frozen weights; refuse weights other than the recorded ones."""

        def check_path() -> None:
            if Path(path).exists() and learned_checkpoint(path) is not None:
                raise UserError(
                    f"{path} is a mask-learning run without weights", hint="give the weights that it was trained on"
                )

        run_on_rank0(world, check_path)
        pieces = {
            f"model.{shard.name}": TensorShard(shard.tensor, shard.shape, shard.offset)
            for shard in engine.param_shards
            if shard.tensor.numel() and not shard.parameter.requires_grad
        }
        self.base = frozen_base.load(path, recorded, pieces, self.recipe.model, world, MOVED)

    def _take_logits(self, theirs: MaskLlm) -> None:
        """Set this rank's logits to those of a MaskLLM checkpoint."""
        assert self.anneal is not None
        refuse_fewer(theirs, self.names, self.recipe)
        known = set(theirs.names())
        for name, size in self.names.items():
            if name not in known or theirs.shape(name) != size or str(theirs.pattern) != self.sparsity.pattern:
                raise UserError(
                    f"{theirs.path} has no {self.sparsity.pattern} logits for {name} of size {size}",
                    where=self.recipe.where("train.init_from"),
                    hint="use its pattern, or exclude such weights with sparsity.exclude",
                )
        for masked in self.masked:
            if masked.logits.tensor.numel():
                masked.logits.tensor.copy_(local_shard(theirs.logits(masked.name), masked.logits))
            masked.begin(None, self.anneal.candidates_CM, self.sparsity)

    def _add_prior(self, world: World) -> str:
        assert self.anneal is not None
        origin, candidates = self.sparsity.prior or _masks_alone(self.recipe.train.init_from), self.anneal.candidates_CM
        prior = None
        if origin is not None:
            prior = MaskPrior(None if origin == FROM_WEIGHTS else masks_of(origin), self.base, self.recipe)
        for masked in self.masked:
            masked.begin(prior, candidates, self.sparsity)
        if prior is not None:
            prior.refuse_if_empty(self.mesh)
        return "without a prior" if origin is None else f"with the masks of {origin} as prior"


class LogitsShard:
    """The logits of one weight on this rank, and the mask choices that metrics compare with."""

    def __init__(self, logits: ParamShard, weight: ParamShard) -> None:
        self.logits, self.weight = logits, weight
        self.name = weight.name
        groups = logits.tensor.shape[:-1]
        self.last = torch.zeros(groups, dtype=torch.uint8, device=logits.tensor.device)
        self.prior = torch.zeros_like(self.last)

    @property
    def device(self) -> torch.device:
        """The device of the logits."""
        return self.last.device

    def begin(self, prior: MaskPrior | None, candidates: Tensor, sparsity: SparsitySection) -> None:
        """Add the prior to the initial logits. Without a prior, metrics compare with the initial logits."""
        if not self.logits.tensor.numel():
            return
        shift = self.logits.tensor
        if prior is not None:
            mask = prior.mask(self.weight).to(self.device)
            shift = gumbel.prior_shift(mask, candidates, sparsity.std, sparsity.prior_strength)
            self.logits.tensor.add_(shift)
        self.prior.copy_(shift.argmax(dim=-1))
        self.last.copy_(self.logits.tensor.argmax(dim=-1))

    def statistics(self, scale: float) -> Tensor:
        """Sums over this rank's groups: largest probability, changed, different from the prior, number of groups.

        The probability is that of drawing a mask, which does not depend on the temperature.
        """
        logits_OGC = self.logits.tensor
        if not logits_OGC.numel():
            return torch.zeros(4, dtype=torch.float64, device=self.device)
        choice = logits_OGC.argmax(dim=-1)
        certain = torch.softmax(logits_OGC * scale, dim=-1).amax(dim=-1).sum(dtype=torch.float64)
        changed, away = (choice != self.last).sum(), (choice != self.prior).sum()
        self.last.copy_(choice)
        groups = torch.full_like(certain, choice.numel())
        return torch.stack([certain, changed.double(), away.double(), groups]) / self.logits.copies

    def state_shards(self) -> dict[str, TensorShard]:
        """The choices, as shards for a checkpoint."""
        if not self.last.numel():
            return {}
        shape, offset = self.logits.shape[:-1], self.logits.offset[:-1]
        return {
            f"masks.{self.name}.last": TensorShard(self.last, shape, offset),
            f"masks.{self.name}.prior": TensorShard(self.prior, shape, offset),
        }


def learned_checkpoint(path: str) -> checkpoint.Checkpoint | None:
    """The checkpoint of a mask-learning run at a path, or None if the path is something else."""
    if not formats.is_own(path):
        return None
    saved = checkpoint.source(path)
    return saved if saved.state.get(SPARSITY, {}).get("method") == "learned" else None


def _maskllm_logits(path: str) -> MaskLlm | None:
    """The logits of a MaskLLM checkpoint, or None if the path is something else."""
    masks = None if formats.is_own(path) else masks_in(formats.open_source(path))
    return masks if masks is not None and masks.learned else None


def _masks_alone(path: str | None) -> str | None:
    """The path if it is a MaskLLM checkpoint with masks but without logits: the masks are the prior."""
    masks = None if path is None or formats.is_own(path) else masks_in(formats.open_source(path))
    return None if masks is None or masks.learned else path


def _weight_of(name: str) -> str:
    return name.removesuffix(LOGITS) + "weight"
