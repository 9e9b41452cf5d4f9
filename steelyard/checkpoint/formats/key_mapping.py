"""The mapping between our tensors and those of other formats, as data. Readers and writers use the same entries.

An entry is one tensor of another format and the tensors of ours that it contains, joined in one of four ways:

    rows       concatenated (a single one: unchanged)
    turned     concatenated and transposed: GPT-2's Conv1D
    groups     query, key and value interleaved by key-value group: Megatron's linear_qkv
    rotated    the pairs (i, i + half) of each head interleaved: llama.cpp's rotary layout

`shard_dim` is the dimension along which tensor parallelism shards it, or None. Where other formats store matrices of
experts one by one, `expert` is the number of the matrix in ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from steelyard.core.recipe.blocks import ExpertsBlock, MlpBlock
from steelyard.core.recipe.hf_fields import HfKeys
from steelyard.core.recipe.model_section import ModelConfig

Join = Literal["rows", "turned", "groups", "rotated"]
PARAMS = ("weight", "bias", "offset")


@dataclass(frozen=True)
class Entry:
    """One tensor of another format."""

    name: str
    ours: tuple[str, ...]
    join: Join = "rows"
    shard_dim: int | None = None
    layer: int | None = None
    expert: int | None = None


def joined(entry: Entry, parts: list[Tensor], config: ModelConfig) -> Tensor:
    """Join our tensors into theirs."""
    if entry.expert is not None:
        parts = [part[entry.expert] for part in parts]
    if entry.join == "groups":
        groups, head = groups_of(config), _head_dim(config)
        rows = [part.unflatten(0, (groups, -1, head)) for part in parts]
        return torch.cat(rows, dim=1).flatten(0, 2)
    if entry.join == "rotated":
        pairs: Tensor = parts[0].unflatten(0, (-1, 2, _head_dim(config) // 2)).transpose(1, 2)
        return pairs.flatten(0, 2)
    whole = parts[0] if len(parts) == 1 else torch.cat(parts)
    return whole.t() if entry.join == "turned" and whole.ndim == 2 else whole


def taken_apart(entry: Entry, whole: Tensor, config: ModelConfig) -> list[Tensor]:
    """Split their tensor into ours."""
    if entry.join == "groups":
        groups, head = groups_of(config), _head_dim(config)
        by_group = whole.unflatten(0, (groups, -1, head))
        sizes = [config.heads // groups, 1, 1]
        return [part.flatten(0, 2) for part in by_group.split(sizes, dim=1)]
    if entry.join == "rotated":
        return [whole.unflatten(0, (-1, _head_dim(config) // 2, 2)).transpose(1, 2).flatten(0, 2)]
    if entry.join == "turned" and whole.ndim == 2:
        whole = whole.t()
    return list(whole.chunk(len(entry.ours))) if len(entry.ours) > 1 else [whole]


def theirs_size(entry: Entry, sizes: dict[str, tuple[int, ...]]) -> tuple[int, ...]:
    """The size of their tensor, given the sizes of ours."""
    first, *rest = (sizes[name] if entry.expert is None else sizes[name][1:] for name in entry.ours)
    whole = (first[0] + sum(size[0] for size in rest), *first[1:])
    return whole[::-1] if entry.join == "turned" else whole


def ours_sizes(entry: Entry, size: tuple[int, ...], config: ModelConfig) -> list[tuple[int, ...]]:
    """The sizes of our tensors, given the size of theirs, which may be wrong."""
    if entry.join == "turned":
        size = size[::-1]
    if len(entry.ours) == 1 or not size:
        return [size] * len(entry.ours)
    shares = [1] * len(entry.ours)
    if len(entry.ours) == 3:
        shares[0] = config.heads // groups_of(config)
    # A size that does not divide is returned unchanged, so that the check against the model's sizes names the tensor.
    if size[0] % sum(shares):
        return [size] * len(entry.ours)
    return [(size[0] // sum(shares) * share, *size[1:]) for share in shares]


def groups_of(config: ModelConfig) -> int:
    """The number of key-value heads, each of which is shared by a group of query heads."""
    return config.blocks.layers[0].attention.kv_heads


def _head_dim(config: ModelConfig) -> int:
    return config.blocks.layers[0].attention.head_dim


ATTENTION = ("query", "key", "value")


def hugging_face(config: ModelConfig, keys: HfKeys | None = None) -> list[Entry]:
    """The tensors of the family's class in `transformers`, or those of other names for the same modules."""
    keys, blocks = keys or config.hf_keys, config.blocks
    entries = [Entry(f"{keys.embed}.weight", ("embed.weight",))]
    if keys.positions is not None:
        entries.append(Entry(f"{keys.positions}.weight", ("positions.weight",)))
    for number, layer in enumerate(blocks.layers):
        params = layer.params()
        for ours, theirs in keys.modules.items():
            parent, _, children = ours.rpartition(".")
            modules = [f"{parent}.{child}".lstrip(".") for child in children.split("+")]
            join: Join = "turned" if keys.transposed and "norm" not in ours else "rows"
            for name in [name for name in PARAMS if f"{modules[0]}.{name}" in params]:
                entry = f"{keys.layer.format(number)}{theirs}.{keys.params.get(name, name)}"
                parts = tuple(f"layers.{number}.{each}.{name}" for each in modules)
                first = params[f"{modules[0]}.{name}"]
                experts = range(first.shape[0]) if first.is_expert else (None,)
                entries += [Entry(entry.format(expert), parts, join, None, number, expert) for expert in experts]
    entries += [Entry(f"{keys.norm}.{keys.params.get(name, name)}", (f"norm.{name}",)) for name in blocks.norm.params()]
    return entries + ([] if config.tied else [Entry(f"{keys.head}.weight", ("head.weight",))])


def megatron(config: ModelConfig) -> list[Entry]:
    """The tensors of megatron-core's `GPTModel`, by the names of its local layers."""
    blocks = config.blocks
    entries = [Entry("embedding.word_embeddings.weight", ("embed.weight",), shard_dim=0)]
    if blocks.positions is not None:
        entries.append(Entry("embedding.position_embeddings.weight", ("positions.weight",)))
    for n, layer in enumerate(blocks.layers):
        ours, theirs, attention, mlp = f"layers.{n}.", f"decoder.layers.{n}.", layer.attention, layer.mlp
        for kind in ("weight", "bias") if attention.qkv_bias else ("weight",):
            qkv = tuple(f"{ours}attention.{part}.{kind}" for part in ATTENTION)
            entries.append(Entry(f"{theirs}self_attention.linear_qkv.{kind}", qkv, "groups", 0, n))
        for kind in ("weight", "bias") if attention.output_bias else ("weight",):
            across = 1 if kind == "weight" else None
            output = (f"{ours}attention.output.{kind}",)
            entries.append(Entry(f"{theirs}self_attention.linear_proj.{kind}", output, "rows", across, n))
        for norm in attention.norms():
            name = f"{theirs}self_attention.{norm[0]}_layernorm.weight"
            entries.append(Entry(name, (f"{ours}attention.{norm}.weight",), layer=n))
        entries += _megatron_experts(mlp, n) if isinstance(mlp, ExpertsBlock) else _megatron_mlp(mlp, n)
        for kind in layer.norm.params():
            entries += [
                Entry(f"{theirs}input_layernorm.{kind}", (f"{ours}attention_norm.{kind}",), layer=n),
                Entry(f"{theirs}pre_mlp_layernorm.{kind}", (f"{ours}mlp_norm.{kind}",), layer=n),
            ]
    entries += [Entry(f"decoder.final_layernorm.{kind}", (f"norm.{kind}",)) for kind in blocks.norm.params()]
    return entries + ([] if config.tied else [Entry("output_layer.weight", ("head.weight",), shard_dim=0)])


def _megatron_mlp(mlp: MlpBlock, n: int, ours: str = "mlp", theirs: str = "mlp") -> list[Entry]:
    entries = []
    for kind in ("weight", "bias") if mlp.bias else ("weight",):
        parts = ("gate", "up") if mlp.gated else ("up",)
        fc1 = tuple(f"layers.{n}.{ours}.{part}.{kind}" for part in parts)
        fc2 = (f"layers.{n}.{ours}.down.{kind}",)
        across = 1 if kind == "weight" else None
        entries += [
            Entry(f"decoder.layers.{n}.{theirs}.linear_fc1.{kind}", fc1, "rows", 0, n),
            Entry(f"decoder.layers.{n}.{theirs}.linear_fc2.{kind}", fc2, "rows", across, n),
        ]
    return entries


def _megatron_experts(block: ExpertsBlock, n: int) -> list[Entry]:
    """The router, the matrices of each expert (`SequentialMLP`), and the shared expert."""
    ours, theirs = f"layers.{n}.mlp.", f"decoder.layers.{n}.mlp."
    entries = [Entry(f"{theirs}router.weight", (f"{ours}router.weight",), layer=n)]
    if block.routing.bias_rate is not None:
        entries.append(Entry(f"{theirs}router.expert_bias", (f"{ours}router.balance",), layer=n))
    for product, parts, shard_dim in (("linear_fc1", ("gate", "up"), 0), ("linear_fc2", ("down",), 1)):
        names = tuple(f"{ours}experts.{part}.weight" for part in parts)
        for expert in range(block.routing.experts):
            name = f"{theirs}experts.local_experts.{expert}.{product}.weight"
            entries.append(Entry(name, names, "rows", shard_dim, n, expert))
    if block.shared is not None:
        entries += _megatron_mlp(block.shared, n, "mlp.shared", "mlp.shared_experts")
    return entries
