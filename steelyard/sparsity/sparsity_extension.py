"""What `[sparsity]` adds to the training loop."""

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
from steelyard.model import Batch, LanguageModel
from steelyard.parallel.mesh import Mesh, alone
from steelyard.parallel.param_shards import ParamShard
from steelyard.parallel.world import World, gather_errors, raise_on_all_ranks, run_on_rank0
from steelyard.sparsity import frozen_base, gumbel, masked_linear
from steelyard.sparsity.distillation import Distilling
from steelyard.sparsity.mask_prior import MaskPrior, held, refuse_fewer
from steelyard.sparsity.mask_sources import LOGITS, SPARSITY, RunMasks, masks_of
from steelyard.sparsity.masked_training import MOVED, FixedZeros, SrSte
from steelyard.sparsity.maskllm import MaskLlm, masks_in
from steelyard.training import device as devices
from steelyard.training.engine import Engine
from steelyard.training.extension import Extension
from steelyard.training.optimizer import ParamGroupOptions

FROM_WEIGHTS = "weights"


def extension(recipe: Recipe) -> Extension | None:
    """The extension that a recipe's `[sparsity]` asks for."""
    if recipe.sparsity is None:
        return None
    if recipe.sparsity.method == "learned":
        return LearnedMasks(recipe, recipe.sparsity)
    return SrSte(recipe) if recipe.sparsity.method == "sr-ste" else FixedZeros(recipe)


class LearnedMasks(Extension):
    """Weights are frozen and belong to a base that checkpoints name; logits over masks are what is trained."""

    needs_samples = True

    def __init__(self, recipe: Recipe, sparsity: SparsitySection) -> None:
        self.recipe, self.sparsity = recipe, sparsity
        self.names = masked_linear.masked_sizes(recipe)
        self.base: dict[str, str] = {}
        self.mesh: Mesh = alone()
        self.course: masked_linear.Course | None = None
        self.numbers = (1.0, 1.0, 0.0)
        self.masked: list[LogitsShard] = []
        self.distilling: Distilling | None = None

    def transform(self, model: LanguageModel) -> None:
        """Freeze the model and put masked maps into its layers."""
        if self.course is None:
            self.course = masked_linear.course_of(self.sparsity, devices.choose(self.recipe))
        masked_linear.freeze(model)
        masked_linear.put_masks(model, self.names, self.recipe.train.seed, self.course)
        if self.sparsity.distill:
            weight, temperature = self.sparsity.distill, self.sparsity.distill_temperature
            self.distilling = Distilling(self.course, weight, temperature)

    def forward(self, model: LanguageModel, batch: Batch) -> Tensor:
        """Follow the dense model's predictions too, if the recipe says so."""
        return super().forward(model, batch) if self.distilling is None else self.distilling(model, batch)

    def assembled(self, stages: dict[int, LanguageModel], parts: list[ParamShard], mesh: Mesh) -> None:
        """Find the logits among the parts, each with the weight it belongs to."""
        self.mesh = mesh
        by_name = {part.name: part for part in parts}
        self.masked = [
            LogitsShard(part, by_name[_weight_of(part.name)]) for part in parts if part.name.endswith(LOGITS)
        ]

    def initial_std(self, part: ParamShard) -> float | None:
        """Logits begin near zero."""
        return self.sparsity.std

    def pace(self, part: ParamShard) -> ParamGroupOptions:
        """Logits have a learning rate and a decay of their own."""
        own, usual = self.sparsity.learning_rate, self.recipe.optim.learning_rate
        rate = self.sparsity.learning_rate_multiplier if own is None else own / usual
        return ParamGroupOptions(rate, self.sparsity.weight_decay)

    def start(self, engine: Engine, world: World) -> str:
        """Weights from the base; logits from an earlier run of masks, or from the prior."""
        origin = self.recipe.train.init_from
        saved = None if origin is None else run_on_rank0(world, lambda: learned_checkpoint(origin))
        theirs = _maskllm_logits(origin) if origin is not None and saved is None else None
        if theirs is not None:
            self._load_base(self.sparsity.base or str(origin), None, engine, world)
            with raise_on_all_ranks(world):
                self._take_logits(theirs)
            return f"new run that goes on from MaskLLM's masks of {origin}"
        if saved is None:
            with raise_on_all_ranks(world):
                path = self._only_base()
            self._load_base(path, None, engine, world)
            with raise_on_all_ranks(world):
                begun = self._add_prior(world)
            return f"new run that learns masks for {self.base['path']}, {begun}"
        with gather_errors(world):
            refuse_fewer(RunMasks(saved), self.names, self.recipe)
            checkpoint.load(saved, engine.pieces(for_saving=False, with_optimizer=False) | self.pieces())
        self._load_recorded_base(saved.state, engine, world)
        return f"new run that goes on from the masks of {saved.path}"

    def resumed(self, engine: Engine, world: World, state: dict[str, Any]) -> None:
        """Weights from the base that the checkpoint names."""
        if self.distilling is not None and world.is_rank0:
            self.distilling.sums_2.copy_(torch.tensor(state[SPARSITY].get("distilled", [0.0, 0.0])))
        self._load_recorded_base(state, engine, world)

    def begin_step(self, step: int, batch: int, loss_scale: float) -> None:
        """Set scale, temperature and weight_reg, which go linearly from the first step's to the last step's.

        The regulariser is counted once for the whole step: each micro-batch of the world adds its share, and the ranks
        that share a micro-batch's sequence a part of that.
        """
        share = (step - 1) / max(1, self.recipe.train.steps - 1)
        scale, temperature, weight_reg = (
            first * (1 - share) + last * share
            for first, last in (self.sparsity.scale, self.sparsity.temperature, self.sparsity.weight_reg)
        )
        self.numbers = (scale, temperature, weight_reg)
        micro_batches = batch // self.recipe.train.micro_batch
        factor = loss_scale / (micro_batches * self.mesh.context.size)
        assert self.course is not None
        values = torch.tensor([scale, temperature, weight_reg * factor])
        self.course.course_3.copy_(values, non_blocking=True)

    def metrics(self) -> dict[str, float]:
        """How decided the masks are, how many changed since the last record, and how far they are from the prior."""
        scale, temperature, weight_reg = self.numbers
        sums = torch.zeros(6, dtype=torch.float64, device=devices.choose(self.recipe))
        for masked in self.masked:
            sums[:4] += masked.looked_at(scale)
        if self.distilling is not None:
            sums[4:] += self.distilling.sums_2
            self.distilling.sums_2.zero_()
        if self.mesh.world.size > 1:
            dist.all_reduce(sums)
        certain, changed, away, groups, apart, tokens = sums.tolist()
        distilled = {} if self.distilling is None else {"distill_loss": apart / max(1, tokens)}
        return distilled | {
            "mask_max_probability": certain / groups,
            "mask_changed": changed / groups,
            "mask_from_prior": away / groups,
            "temperature": temperature,
            "scale": scale,
            "weight_reg": weight_reg,
        }

    def saves(self, part: ParamShard) -> bool:
        """Frozen weights are in the base already."""
        return part.parameter.requires_grad

    def pieces(self) -> dict[str, TensorShard]:
        """Each group's choice at the last record, and the prior's: what records compare with."""
        return {name: piece for masked in self.masked for name, piece in masked.pieces().items()}

    def state(self) -> dict[str, Any]:
        """What the masks belong to."""
        about: dict[str, Any] = {"method": "learned", "pattern": self.sparsity.pattern, "base": self.base}
        if self.distilling is not None:
            sums = self.distilling.sums_2.clone()
            if self.mesh.world.size > 1:
                dist.all_reduce(sums)
            about["distilled"] = sums.tolist()
        return {SPARSITY: about}

    def _only_base(self) -> str:
        origin, named = self.recipe.train.init_from, self.sparsity.base
        if origin is not None and named is not None and origin != named:
            raise UserError(
                f"masks are learned for the weights of {named}, and {origin} is no run of masks to begin with",
                where=self.recipe.where("train.init_from"),
                hint="name the weights once",
            )
        path = named or origin
        assert path is not None, "the recipe was checked"
        return path

    def _load_recorded_base(self, state: dict[str, Any], engine: Engine, world: World) -> None:
        recorded = state.get(SPARSITY, {}).get("base", {})
        self._load_base(self.sparsity.base or str(recorded.get("path", "")), recorded, engine, world)

    def _load_base(self, path: str, recorded: dict[str, Any] | None, engine: Engine, world: World) -> None:
        """Read the frozen weights, which must be those recorded, if any are."""

        def look() -> None:
            if Path(path).exists() and learned_checkpoint(path) is not None:
                raise UserError(f"{path} is a run of masks, and no weights", hint="name the weights it belongs to")
            if recorded is not None:
                frozen_base.place(recorded, path, MOVED)

        run_on_rank0(world, look)
        self.base = frozen_base.identity_by_all(path, world)
        if recorded is not None:
            with raise_on_all_ranks(world):
                frozen_base.refuse_others(recorded, self.base, MOVED)
        pieces = {
            f"model.{part.name}": TensorShard(part.tensor, part.shape, part.offset)
            for part in engine.parts
            if part.tensor.numel() and not part.parameter.requires_grad
        }
        with gather_errors(world):
            formats.load_pieces(formats.open_source(path), pieces, self.recipe.model)

    def _take_logits(self, theirs: MaskLlm) -> None:
        """Set the logits to those of another run, as far as this rank holds them."""
        assert self.course is not None
        refuse_fewer(theirs, self.names, self.recipe)
        known = set(theirs.names())
        for name, size in self.names.items():
            if name not in known or theirs.shape(name) != size or str(theirs.pattern) != self.sparsity.pattern:
                raise UserError(
                    f"{theirs.path} has no {self.sparsity.pattern} logits for {name} of {size}",
                    where=self.recipe.where("train.init_from"),
                    hint="choose its pattern, or leave such weights out with sparsity.exclude",
                )
        for masked in self.masked:
            if masked.logits.tensor.numel():
                masked.logits.tensor.copy_(held(theirs.logits(masked.name), masked.logits))
            masked.begin(None, self.course.candidates_CM, self.sparsity)

    def _add_prior(self, world: World) -> str:
        assert self.course is not None
        named, candidates = self.sparsity.prior or _masks_alone(self.recipe.train.init_from), self.course.candidates_CM
        prior = None
        if named is not None:
            prior = MaskPrior(None if named == FROM_WEIGHTS else masks_of(named), self.base, self.recipe)
        for masked in self.masked:
            masked.begin(prior, candidates, self.sparsity)
        if prior is not None:
            prior.refuse_if_empty(self.mesh)
        return "with no prior" if named is None else f"near the masks of {named}"


class LogitsShard:
    """The logits of one weight on this rank, and the choices that records compare with."""

    def __init__(self, logits: ParamShard, weight: ParamShard) -> None:
        self.logits, self.weight = logits, weight
        self.name = weight.name
        groups = logits.tensor.shape[:-1]
        self.last = torch.zeros(groups, dtype=torch.uint8, device=logits.tensor.device)
        self.prior = torch.zeros_like(self.last)

    @property
    def device(self) -> torch.device:
        """Where the logits lie."""
        return self.last.device

    def begin(self, prior: MaskPrior | None, candidates: Tensor, sparsity: SparsitySection) -> None:
        """Add the prior to the initial logits. Without one, what is compared with is how they began."""
        if not self.logits.tensor.numel():
            return
        towards = self.logits.tensor
        if prior is not None:
            mask = prior.mask(self.weight).to(self.device)
            towards = gumbel.prior_shift(mask, candidates, sparsity.std, sparsity.prior_strength)
            self.logits.tensor.add_(towards)
        self.prior.copy_(towards.argmax(dim=-1))
        self.last.copy_(self.logits.tensor.argmax(dim=-1))

    def looked_at(self, scale: float) -> Tensor:
        """Sums over this rank's share of the groups: largest probability, changed, not the prior's, and their number.

        The probability is that of being drawn, which the temperature does not change.
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

    def pieces(self) -> dict[str, TensorShard]:
        """The choices, as pieces of the whole."""
        if not self.last.numel():
            return {}
        shape, offset = self.logits.shape[:-1], self.logits.offset[:-1]
        return {
            f"masks.{self.name}.last": TensorShard(self.last, shape, offset),
            f"masks.{self.name}.prior": TensorShard(self.prior, shape, offset),
        }


def learned_checkpoint(path: str) -> checkpoint.Checkpoint | None:
    """The checkpoint of a run of masks that a path means, or none where it means something else."""
    if not formats.is_own(path):
        return None
    saved = checkpoint.source(path)
    return saved if saved.state.get(SPARSITY, {}).get("method") == "learned" else None


def _maskllm_logits(path: str) -> MaskLlm | None:
    """The logits of a checkpoint of MaskLLM's, if that is what a path means."""
    found = None if formats.is_own(path) else masks_in(formats.open_source(path))
    return found if found is not None and found.learned else None


def _masks_alone(path: str | None) -> str | None:
    """The path of a checkpoint of MaskLLM's that holds masks and no logits: they are what to begin near."""
    found = None if path is None or formats.is_own(path) else masks_in(formats.open_source(path))
    return None if found is None or found.learned else path


def _weight_of(name: str) -> str:
    return name.removesuffix(LOGITS) + "weight"
