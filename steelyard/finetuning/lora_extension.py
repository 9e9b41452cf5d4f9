"""LoRA in the training loop: initial values, adapter-only checkpoints, and merged weights."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from steelyard.checkpoint import TensorShard, formats
from steelyard.checkpoint.formats import CheckpointSource, SourceView
from steelyard.core.errors import UserError
from steelyard.core.recipe import Recipe
from steelyard.core.recipe.finetune_section import AdapterSection, BasePrecision
from steelyard.finetuning.lora import NAMES, add_adapters, is_adapter, merged
from steelyard.finetuning.quantized_base import MATRIX, load_quantized
from steelyard.model import LanguageModel
from steelyard.parallel.mesh import Mesh, alone
from steelyard.parallel.param_shards import ParamShard
from steelyard.parallel.tensor_parallel import ADAPTER_IN, MAGNITUDE
from steelyard.parallel.world import World, gather_errors, run_on_rank0
from steelyard.sparsity import frozen_base
from steelyard.training.engine import Engine
from steelyard.training.extension import Extension

STATE = "adapter"
MOVED = "set train.init_from to its current path"


class LoraExtension(Extension):
    """Trains adapters of a frozen base model. Checkpoints hold the adapters and a reference to the base."""

    def __init__(self, recipe: Recipe) -> None:
        assert recipe.finetune is not None
        assert recipe.finetune.adapter is not None
        self.recipe, self.adapter, self.stored = recipe, recipe.finetune.adapter, recipe.finetune.stored
        self.keeps_zeros = recipe.sparsity is not None
        if recipe.sparsity is not None and (
            recipe.sparsity.method != "fixed" or recipe.sparsity.mask is not None or self.adapter.kind != "lora"
        ):
            raise UserError(
                'with [sparsity], adapters support only method = "fixed" without a mask file, and only LoRA',
                where=recipe.where("sparsity.method"),
                hint="apply a mask file first (steelyard mask apply), or use full fine-tuning",
            )
        self.base: dict[str, str] = {}
        self.mesh: Mesh = alone()

    def transform(self, model: LanguageModel) -> None:
        """Freeze the model and add adapters."""
        add_adapters(model, self.adapter, self.keeps_zeros, self.stored)

    def parallelized(self, stages: dict[int, LanguageModel], param_shards: list[ParamShard], mesh: Mesh) -> None:
        """Store the mesh, for sums over tensor-parallel ranks."""
        self.mesh = mesh

    def initial_std(self, shard: ParamShard) -> float | None:
        """A is random, with PEFT's standard deviation; B is zero."""
        return (3 * shard.shape[-1]) ** -0.5 if shard.name.endswith(ADAPTER_IN) else 0.0

    def start(self, engine: Engine, world: World) -> str:
        """Load weights from the base; initialise DoRA's magnitudes from the row norms."""
        self._load_base(None, engine, world)
        if self.stored is None:
            self._set_magnitudes(engine)
        is_partial = self.recipe.model.blocks.has_experts and not self.adapter.has_experts
        without = '; experts have none, unless finetune.adapter.targets has "experts"' if is_partial else ""
        return f"new run with adapters for {self.base['path']}{without}"

    def resumed(self, engine: Engine, world: World, state: dict[str, Any]) -> None:
        """Load weights from the base that the checkpoint refers to."""
        saved = state.get(STATE, {})
        if saved_precision(saved) != self.stored:
            raise UserError(
                "finetune.base_precision or finetune.double_quant is not that of the checkpoint",
                where=self.recipe.where("finetune.base_precision"),
                hint="adapters belong to the weights they were trained with: start a new run",
            )
        self._load_base(saved.get("base", {}), engine, world)

    def saves(self, shard: ParamShard) -> bool:
        """Only adapters are saved; frozen weights are in the base."""
        return shard.parameter.requires_grad

    def state(self) -> dict[str, Any]:
        """The base and the settings of the adapters."""
        stored = {} if self.stored is None else {"base_precision": list(self.stored)}
        settings = {"base": self.base, "keeps_zeros": self.keeps_zeros, "adapter": self.adapter.model_dump()}
        return {STATE: settings | stored}

    def _load_base(self, recorded: dict[str, Any] | None, engine: Engine, world: World) -> None:
        origin = str(self.recipe.train.init_from)

        def identified() -> dict[str, str]:
            source = formats.open_source(origin)
            if recorded is not None:
                frozen_base.check(recorded, source, MOVED)
                return {"path": str(source.path.resolve()), "sha256": str(recorded["sha256"])}
            return frozen_base.identity(source)

        self.base = run_on_rank0(world, identified)
        with gather_errors(world):
            self.load(formats.open_source(origin), engine, is_new=recorded is None)

    def load(self, source: CheckpointSource, engine: Engine, is_new: bool) -> None:
        """Load the frozen weights from the base. In a new run, quantized matrices also set DoRA's magnitudes."""
        frozen = {
            f"model.{shard.name}": TensorShard(shard.tensor, shard.shape, shard.offset)
            for shard in engine.param_shards
            if shard.tensor.numel() and not shard.parameter.requires_grad and f".{MATRIX}." not in shard.name
        }
        formats.load_shards(source, frozen, self.recipe.model)
        if self.stored is not None:
            load_quantized(source, engine, self.stored, sets_magnitudes=is_new)

    @torch.no_grad()
    def _set_magnitudes(self, engine: Engine) -> None:
        by_name = {shard.name: shard for shard in engine.param_shards}
        for shard in engine.param_shards:
            if not shard.name.endswith(MAGNITUDE) or not shard.tensor.numel():
                continue
            weight = by_name[shard.name.removesuffix(MAGNITUDE) + MATRIX]
            squares = weight.tensor.float().square().sum(dim=1)
            if weight.is_tp_sharded and not shard.is_tp_sharded:
                dist.all_reduce(squares, group=self.mesh.tensor.group)
            shard.tensor.copy_(squares.sqrt())


def saved_precision(state: dict[str, Any]) -> BasePrecision | None:
    """The precision of the frozen matrices in the state of a checkpoint."""
    return BasePrecision(*state["base_precision"]) if "base_precision" in state else None


class AdaptedSource(SourceView):
    """A base with the adapters of a run merged."""

    def __init__(
        self, adapters: CheckpointSource, origin: CheckpointSource, adapter: AdapterSection, keeps_zeros: bool
    ) -> None:
        super().__init__(origin)
        self.adapters, self.adapter, self.keeps_zeros = adapters, adapter, keeps_zeros
        self.format, self.path, self.dtype = adapters.format, adapters.path, torch.float32
        self.step, self.layout = adapters.step, adapters.layout
        self.adapted = {name.rpartition(".")[0] for name in adapters.names() if is_adapter(name)}
        if not self.adapted:
            raise UserError(f"{adapters.path} contains no adapters")

    def tensor(self, name: str) -> Tensor:
        """A tensor of the base, with its adapter merged if it has one."""
        weight = super().tensor(name)
        module = name.removesuffix(".weight")
        if module not in self.adapted:
            return weight
        return merged(weight, self.adapter_weights(module), self.adapter.alpha / self.adapter.rank, self.keeps_zeros)

    def adapter_weights(self, module: str) -> dict[str, Tensor]:
        """The adapter's parameters of one matrix, by name."""
        known = set(self.adapters.names())
        return {name: self.adapters.tensor(f"{module}.{name}") for name in NAMES if f"{module}.{name}" in known}
