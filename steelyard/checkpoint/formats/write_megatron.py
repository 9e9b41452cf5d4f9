"""Write Megatron's `torch` and `torch_dist` checkpoints.

A `torch` checkpoint has one file for each pair of tensor-parallel and pipeline-parallel rank. All files are created
first, without tensor data. Then each tensor is read once, and its shards are written to the files at their offsets.
"""

from __future__ import annotations

import math
import os
import re
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from steelyard.checkpoint import folder as folders
from steelyard.checkpoint.formats.key_mapping import Entry, groups_of, joined, megatron
from steelyard.checkpoint.formats.megatron_args import LATEST, args_of, padded_rows
from steelyard.checkpoint.formats.megatron_layout import MegatronLayout
from steelyard.checkpoint.formats.safetensors import write_tensor
from steelyard.checkpoint.sharded_tensor import LazyTensor
from steelyard.core import files
from steelyard.core.recipe.blocks import ExpertsBlock
from steelyard.core.recipe.model_section import ModelConfig

if TYPE_CHECKING:
    from steelyard.checkpoint.formats.write import Supply

ITERATION = 1
# In `torch_dist`, and with layers of Transformer Engine, a norm is part of the linear layer that follows it.
TE_NAMES = {
    ".input_layernorm.": ".self_attention.linear_qkv.layer_norm_",
    ".pre_mlp_layernorm.": ".mlp.linear_fc1.layer_norm_",
}
EXPERT = re.compile(r"\.local_experts\.(\d+)\.(linear_fc[12])\.weight$")


def bytes_of(supply: Supply, layout: MegatronLayout) -> int:
    """The size of a `torch` checkpoint.

    Every tensor rank of a stage has a copy of an unsharded tensor; a tied embedding is in the first and last stage.
    """
    layout.check(supply.config)
    stages = layout.stages(supply.config)
    copies = {
        entry: len(_names(entry, stages, supply.config.tied)) * (layout.tensor if entry.shard_dim is None else 1)
        for entry in megatron(supply.config)
    }
    elements = (math.prod(_padded_size(entry, supply, layout.tensor)) * times for entry, times in copies.items())
    return sum(elements) * supply.dtype.itemsize


def torch_files(supply: Supply, folder: Path, layout: MegatronLayout) -> None:
    """Write a `torch` checkpoint."""
    stages = layout.stages(supply.config)
    entries = [(entry, _names(entry, stages, supply.config.tied)) for entry in megatron(supply.config)]
    iteration = folder / f"iter_{ITERATION:07d}"
    with ExitStack() as stack:
        written: dict[tuple[int, int], _RankFile] = {}
        for stage in range(layout.pipeline):
            here = [(entry, names[stage]) for entry, names in entries if stage in names]
            for rank in range(layout.tensor):
                suffix = f"_{stage:03d}" if layout.pipeline > 1 else ""
                path = iteration / f"mp_rank_{rank:02d}{suffix}" / "model_optim_rng.pt"
                written[rank, stage] = stack.enter_context(_RankFile(path, supply, layout, here))
        for entry, names in entries:
            for rank, parts in enumerate(_shards(entry, supply, layout.tensor)):
                for stage in names:
                    written[rank, stage].put(entry, parts)
    files.write_text(folder / LATEST, f"{ITERATION}\n")


def _names(entry: Entry, stages: list[range], tied: bool) -> dict[int, str]:
    """The stages that have a tensor, and its name there: the layers of a stage are numbered from 0."""
    last = len(stages) - 1
    if entry.layer is not None:
        stage = next(number for number, layers in enumerate(stages) if entry.layer in layers)
        return {stage: entry.name.replace(f".{entry.layer}.", f".{entry.layer - stages[stage].start}.", 1)}
    if entry.ours == ("embed.weight",) and tied and last > 0:
        return {0: entry.name, last: "output_layer.weight"}
    return {last if entry.name.startswith(("decoder.final", "output_layer")) else 0: entry.name}


def _shards(entry: Entry, supply: Supply, ranks: int) -> list[list[Tensor]]:
    """The shard of each tensor rank, as consecutive parts, which are written without concatenation."""
    parts = supply.parts(entry)
    if entry.expert is not None:
        parts, entry = [part[entry.expert] for part in parts], replace(entry, expert=None)
    if entry.shard_dim is None:
        return [[joined(entry, parts, supply.config)]] * ranks
    if entry.shard_dim == 1:
        return [[piece] for piece in joined(entry, parts, supply.config).chunk(ranks, dim=1)]
    if entry.ours[0] in ("embed.weight", "head.weight"):
        rows = padded_rows(supply.config.vocab, ranks) // ranks
        pieces = [parts[0][rank * rows : (rank + 1) * rows] for rank in range(ranks)]
        return [[piece, parts[0][-1:].expand(rows - len(piece), -1)] for piece in pieces]
    # A share has the rows of one group in each of our tensors; without groups there is one share per rank.
    groups = groups_of(supply.config) if entry.join == "groups" else ranks
    shares = list(zip(*(part.chunk(groups) for part in parts), strict=True))
    per_rank = groups // ranks
    return [
        [part for share in shares[rank * per_rank : (rank + 1) * per_rank] for part in share] for rank in range(ranks)
    ]


def with_padding(table: Tensor, rows: int) -> Tensor:
    """An embedding or head, padded by repeating the last row, as Megatron's own converters do."""
    return torch.cat([table, table[-1:].expand(rows - len(table), -1)]) if rows > len(table) else table


class _RankFile:
    """The file of one rank: created without tensor data, then filled."""

    def __init__(self, path: Path, supply: Supply, layout: MegatronLayout, entries: list[tuple[Entry, str]]) -> None:
        self.path, self.offsets = path, {}
        path.parent.mkdir(parents=True)
        args = args_of(supply.config, supply.dtype, supply.source.hf_metadata, layout)
        head = {"args": args, "checkpoint_version": 3.0, "iteration": ITERATION}
        with FakeTensorMode():
            weights = {}
            for entry, name in entries:
                size = list(_padded_size(entry, supply, layout.tensor))
                if entry.shard_dim is not None:
                    size[entry.shard_dim] //= layout.tensor
                weights[_name_in(layout, entry, supply.config, name)] = torch.empty(size, dtype=supply.dtype)
            with torch.serialization.skip_data(materialize_fake_tensors=True):
                torch.save({**head, "model": weights}, path)
            with torch.serialization.safe_globals([type(args)]):
                saved = torch.load(path, weights_only=True)["model"]
        for (entry, _), tensor in zip(entries, saved.values(), strict=True):
            self.offsets[entry.name] = int(tensor.untyped_storage()._checkpoint_offset), tuple(tensor.shape)

    def __enter__(self) -> _RankFile:
        self.descriptor = os.open(self.path, os.O_WRONLY)
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self.descriptor)

    def put(self, entry: Entry, parts: list[Tensor]) -> None:
        """Write the parts of a tensor consecutively at its offset."""
        offset, size = self.offsets[entry.name]
        rows = sum(len(part) for part in parts)
        assert (rows, *parts[0].shape[1:]) == size, f"{entry.name}: {rows} rows for the size {size}"
        for part in parts:
            offset += write_tensor(self.descriptor, part, offset)


def _padded_size(entry: Entry, supply: Supply, ranks: int) -> tuple[int, ...]:
    size = supply.size(entry)
    if entry.ours[0] in ("embed.weight", "head.weight"):
        return (padded_rows(supply.config.vocab, ranks), *size[1:])
    return size


def torch_dist(supply: Supply, folder: Path, layout: MegatronLayout) -> None:
    """Write a `torch_dist` checkpoint, which can be loaded with any layout."""
    iteration = folder / f"iter_{ITERATION:07d}"
    iteration.mkdir()
    stacks: dict[str, list[Entry]] = {}
    for entry in megatron(supply.config):
        for name in _names_in_dist(entry, supply.config):
            stacks.setdefault(name, []).append(entry)
    tensors = {name: _lazy(entries, supply) for name, entries in stacks.items()}
    args = args_of(supply.config, supply.dtype, supply.source.hf_metadata, replace(layout, engine=True))
    folders.fill(iteration, {**tensors, **_empty_states(supply.config)}, None)
    torch.save({"args": args, "checkpoint_version": 3.0, "iteration": ITERATION}, iteration / "common.pt")
    backends = {"sharded_backend": "torch_dist", "common_backend": "torch"}
    files.write_json(iteration / "metadata.json", {**backends, **{f"{key}_version": 1 for key in backends}})
    files.write_text(folder / LATEST, f"{ITERATION}\n")


def _stacks_layers(config: ModelConfig) -> bool:
    """Whether the tensors of all layers are stacked into one: not if only some layers have experts."""
    return len({isinstance(layer.mlp, ExpertsBlock) for layer in config.blocks.layers}) == 1


def _names_in_dist(entry: Entry, config: ModelConfig) -> list[str]:
    """The names of the tensor that contains an entry.

    The norm before experts has two: Megatron's local layers and those of Transformer Engine name it differently.
    """
    name = EXPERT.sub(r".experts.\2.weight", entry.name)
    names = [_te_name(name)]
    if _precedes_experts(entry, config):
        names.append(name)
    if _stacks_layers(config):
        names = [name.replace(f"layers.{entry.layer}.", "layers.") for name in names]
    return names


def _precedes_experts(entry: Entry, config: ModelConfig) -> bool:
    is_norm = entry.layer is not None and ".pre_mlp_layernorm." in entry.name
    return is_norm and isinstance(config.blocks.layers[entry.layer or 0].mlp, ExpertsBlock)


def _lazy(entries: list[Entry], supply: Supply) -> LazyTensor:
    """A tensor of `torch_dist`, made layer by layer if layers are stacked. Experts are stacked within a layer."""
    size = _padded_size(entries[0], supply, 1)
    is_stacked = entries[0].layer is not None and _stacks_layers(supply.config)
    layers = supply.config.layers if is_stacked else 1
    experts = len(entries) // layers
    if entries[0].expert is not None:
        size = (experts, *size)

    def make(part: int) -> Tensor:
        layer = entries[part * experts : (part + 1) * experts]
        if layer[0].expert is not None:
            whole = torch.stack([supply.whole(entry) for entry in layer])
        else:
            whole = with_padding(supply.whole(layer[0]), size[0])
        return whole[None] if is_stacked else whole

    return LazyTensor(make, (layers, *size) if is_stacked else size, supply.dtype, layers)


def _empty_states(config: ModelConfig) -> dict[str, list[None]]:
    """The extra state that Megatron expects for each linear layer; it is empty without fp8."""
    states: dict[str, list[None]] = {}
    for entry in megatron(config):
        product, _, kind = entry.name.rpartition(".")
        if entry.layer is None or ".linear_" not in product or kind != "weight":
            continue
        places = [(entry.layer, config.layers)] if _stacks_layers(config) else []
        if entry.expert is not None:
            experts = config.blocks.layers[entry.layer].mlp
            assert isinstance(experts, ExpertsBlock)
            places.append((entry.expert, experts.routing.experts))
        offsets, sizes = (".".join(map(str, numbers)) for numbers in zip(*(places or [(0, 1)]), strict=True))
        (name,) = _names_in_dist(entry, config)
        states[f"{name.removesuffix('.weight')}._extra_state/shard_{offsets}_{sizes}"] = [None]
    return states


def _te_name(name: str) -> str:
    for theirs, engine in TE_NAMES.items():
        name = name.replace(theirs, engine)
    return name


def _name_in(layout: MegatronLayout, entry: Entry, config: ModelConfig, name: str) -> str:
    """The name of a tensor in a `torch` checkpoint with this kind of layers."""
    if layout.grouped and entry.expert is not None:
        return EXPERT.sub(r".\2.weight\1", name)
    return _te_name(name) if layout.engine and not _precedes_experts(entry, config) else name
