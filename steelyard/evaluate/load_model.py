"""Loads a checkpoint of any format as a model for inference, complete or sharded over tensor-parallel ranks."""

from __future__ import annotations

from dataclasses import replace

import torch
from pydantic import ValidationError

from steelyard.checkpoint.formats import CheckpointSource
from steelyard.checkpoint.formats.compressed_tensors import CompressedSource
from steelyard.checkpoint.formats.hf_config import positions_of
from steelyard.checkpoint.formats.source import check
from steelyard.core.errors import UserError
from steelyard.core.recipe import Recipe
from steelyard.core.recipe.data_section import DataSection
from steelyard.core.recipe.parallel_section import ParallelSection
from steelyard.evaluate.join_projections import join_projections
from steelyard.model import LanguageModel
from steelyard.model.experts import MATRIX_MODULES
from steelyard.parallel import mesh as meshes
from steelyard.parallel.mesh import FsdpMesh, Mesh
from steelyard.parallel.parallelize import parallelize
from steelyard.parallel.param_shards import ParamShard
from steelyard.sparsity import sparse_linear
from steelyard.sparsity.semi_structured import CompressedView
from steelyard.text import tokenizer as tokenizers
from steelyard.text.tokenizer import Tokenizer

COMPRESSED = (CompressedSource, CompressedView)


def tokenizer_for(source: CheckpointSource, named: str | None) -> Tokenizer:
    """The given tokenizer, or the checkpoint's own."""
    if named is not None:
        return tokenizers.load_tokenizer(named)
    if source.tokenizer is None:
        raise UserError(
            f"{source.path} has no tokenizer",
            hint="give one with --tokenizer, or in the recipe's data.tokenizer",
        )
    return source.load_tokenizer()


def context_of(source: CheckpointSource) -> int:
    """The context length of the model in tokens."""
    return positions_of(source.config, source.hf_metadata)


def mesh_for(tensor: int, device: torch.device) -> Mesh:
    """A mesh without FSDP: each rank holds its whole tensor-parallel shard, so weights are never gathered."""
    return replace(meshes.make(ParallelSection(tensor=tensor), device.type), fsdp=FsdpMesh())


def loaded(
    source: CheckpointSource,
    device: torch.device,
    dtype: torch.dtype,
    mesh: Mesh | None = None,
    compiled: bool = False,
    sparse: bool | None = None,
) -> LanguageModel:
    """This rank's shard of the model with the checkpoint's weights, for inference only.

    Compressed weights stay compressed on a GPU that holds the whole model. A CPU, and ranks that share the model, hold
    them dense, unless `sparse` decides.
    """
    mesh = mesh or meshes.alone()
    check(source, source.config)
    recipe = _recipe(source, mesh.tensor.size)
    if sparse is None:
        sparse = device.type == "cuda" and mesh.tensor.size == 1 and dtype in sparse_linear.DTYPES

    def transform(model: LanguageModel) -> None:
        _cast(model, dtype)
        if sparse and isinstance(source, COMPRESSED):
            sparse_linear.put(model, source.compressed, dtype, source.value_format)

    parallel_model = parallelize(recipe, mesh, device, dtype, compiled, transform)
    _fill(parallel_model.param_shards, source)
    if device.type == "cuda" and mesh.tensor.size == 1 and not compiled:
        join_projections(parallel_model.model)
    sparse_linear.prepare(parallel_model.model)
    return parallel_model.model.requires_grad_(False).eval()


def _recipe(source: CheckpointSource, tensor: int) -> Recipe:
    try:
        return Recipe(
            name="evaluation",
            model=source.config,
            parallel=ParallelSection(tensor=tensor),
            data=DataSection(sequence_length=1),
        )
    except ValidationError as error:
        raise UserError(error.errors()[0]["msg"], where="--tensor", hint="choose another number of ranks") from None


def _cast(network: LanguageModel, dtype: torch.dtype) -> None:
    """Cast matrices to the precision they are used in. Norms stay in fp32, in which they compute."""
    for module in network.modules():
        if isinstance(module, MATRIX_MODULES):
            module.to(dtype)


def _fill(param_shards: list[ParamShard], source: CheckpointSource) -> None:
    with torch.no_grad():
        for shard in param_shards:
            values = source.tensor(shard.name)
            for dim, (first, length) in enumerate(zip(shard.offset, shard.tensor.shape, strict=True)):
                values = values.narrow(dim, first, length)
            shard.tensor.copy_(values)
