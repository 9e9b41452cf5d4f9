"""Build a rank's part of a model from a recipe and a mesh, and apply each form of parallelism, in the order below."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from steelyard import model as models
from steelyard.core.recipe import Recipe
from steelyard.model import LanguageModel
from steelyard.parallel import activation_checkpoint, context_parallel, expert_parallel, fsdp, tensor_parallel
from steelyard.parallel.mesh import Mesh
from steelyard.parallel.param_shards import ParamShard, param_shards_of
from steelyard.parallel.pipeline_parallel import Pipeline, stage_specs
from steelyard.sizes.stage_layers import partition_of


def compile_options(recipe: Recipe) -> dict[str, Any]:
    """How the compiler chooses its kernels: it times a few of each, or searches. Gains: docs/benchmarks.md."""
    if recipe.train.tune_kernels:
        return {"coordinate_descent_tuning": True}
    return {"max_autotune_pointwise": True, "triton.mix_order_reduction_autotune_split_size": True}


@dataclass(frozen=True)
class ParallelModel:
    """A rank's part of a model, allocated; its weights are not initialized yet."""

    stages: dict[int, LanguageModel]
    param_shards: list[ParamShard]
    pipeline: Pipeline | None

    @property
    def model(self) -> LanguageModel:
        """The model, if it is not split into stages."""
        assert self.pipeline is None
        return next(iter(self.stages.values()))


def parallelize(
    recipe: Recipe,
    mesh: Mesh,
    device: torch.device,
    dtype: torch.dtype,
    compiled: bool,
    transform: Callable[[LanguageModel], None] | None = None,
) -> ParallelModel:
    """Build this rank's part. `transform` may change the model before it is split, on the meta device."""
    parallel = recipe.parallel
    by_sequence = parallel.sequence_parallel and mesh.tensor.size > 1
    stages: dict[int, LanguageModel] = {}
    param_shards: list[ParamShard] = []
    for number, stage_spec in stage_specs(partition_of(recipe), parallel, mesh.pipeline).items():
        with torch.device("meta"):
            model = models.build(recipe.model, stage_spec)
        model.dtype = dtype
        model.seed_dropout(recipe.train.seed)
        if transform is not None:
            transform(model)
        specs = tensor_parallel.split(model, mesh.tensor, by_sequence) if mesh.tensor.size > 1 else {}
        expert_specs = expert_parallel.split(model, mesh.expert) if mesh.expert.size > 1 else {}
        if mesh.context.size > 1:
            context_parallel.split(model, mesh.context)
        activation_checkpoint.apply(model, parallel.recompute)
        if compiled:
            for layer in model.layers.values():
                layer.compile(options=compile_options(recipe))
        gradients = torch.bfloat16 if recipe.optim.gradients == "bf16" else torch.float32
        fsdp.materialize(model, device, mesh, parallel.zero, gradients)
        stages[number] = model
        param_shards += param_shards_of(model, mesh, specs, expert_specs, by_sequence)
    pipeline = Pipeline(stages, parallel, mesh.pipeline, device) if mesh.pipeline.size > 1 else None
    return ParallelModel(stages, param_shards, pipeline)
