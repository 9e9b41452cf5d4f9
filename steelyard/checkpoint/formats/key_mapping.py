"""The mapping between our tensors and those of other formats, as data. Readers and writers use the same entries.

An entry is one tensor of another format and the tensors of ours that it contains, joined in one of four ways:

    rows       concatenated (a single one: unchanged)
    turned     concatenated and transposed: GPT-2's Conv1D
    groups     query, key and value interleaved by key-value group: Megatron's linear_qkv
    rotated    the pairs (i, i + half) of each head interleaved: llama.cpp's rotary layout

`cut` is the dimension along which tensor parallelism shards it, or None.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from steelyard.core.recipe.model_section import GptConfig, LlamaConfig

Config = GptConfig | LlamaConfig
Join = Literal["rows", "turned", "groups", "rotated"]


@dataclass(frozen=True)
class Entry:
    """One tensor of another format."""

    name: str
    ours: tuple[str, ...]
    join: Join = "rows"
    cut: int | None = None
    layer: int | None = None


def joined(entry: Entry, parts: list[Tensor], config: Config) -> Tensor:
    """Join our tensors into theirs."""
    if entry.join == "groups":
        groups, head = groups_of(config), _head_dim(config)
        rows = [part.unflatten(0, (groups, -1, head)) for part in parts]
        return torch.cat(rows, dim=1).flatten(0, 2)
    if entry.join == "rotated":
        pairs: Tensor = parts[0].unflatten(0, (-1, 2, _head_dim(config) // 2)).transpose(1, 2)
        return pairs.flatten(0, 2)
    whole = parts[0] if len(parts) == 1 else torch.cat(parts)
    return whole.t() if entry.join == "turned" and whole.ndim == 2 else whole


def taken_apart(entry: Entry, whole: Tensor, config: Config) -> list[Tensor]:
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
    first, *rest = (sizes[name] for name in entry.ours)
    whole = (first[0] + sum(size[0] for size in rest), *first[1:])
    return whole[::-1] if entry.join == "turned" else whole


def ours_sizes(entry: Entry, size: tuple[int, ...], config: Config) -> list[tuple[int, ...]]:
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


def groups_of(config: Config) -> int:
    """The number of key-value heads, each of which is shared by a group of query heads."""
    return config.heads if isinstance(config, GptConfig) else config.kv_heads


def _head_dim(config: Config) -> int:
    return config.hidden // config.heads if isinstance(config, GptConfig) else config.head_dim


ATTENTION = ("query", "key", "value")
# The modules of a layer: our name, then theirs.
HF_LLAMA = {
    "attention_norm": "input_layernorm", "attention.query": "self_attn.q_proj", "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj", "attention.output": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm", "mlp.gate": "mlp.gate_proj", "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}  # fmt: skip
GGUF_LLAMA = {
    "attention_norm": "attn_norm", "attention.query": "attn_q", "attention.key": "attn_k", "attention.value": "attn_v",
    "attention.output": "attn_output", "mlp_norm": "ffn_norm", "mlp.gate": "ffn_gate", "mlp.up": "ffn_up",
    "mlp.down": "ffn_down",
}  # fmt: skip


def hugging_face(config: Config) -> list[Entry]:
    """The tensors of `LlamaForCausalLM` and similar classes, or of `GPT2LMHeadModel`."""
    return _gpt2(config) if isinstance(config, GptConfig) else _llama(config, HF_LLAMA, "model.layers.{}.", "model.")


def _llama(config: LlamaConfig, table: dict[str, str], layer_prefix: str, prefix: str) -> list[Entry]:
    entries = [Entry(f"{prefix}embed_tokens.weight", ("embed.weight",))]
    for number in range(config.layers):
        for ours, theirs in table.items():
            kinds = (
                ("weight", "bias") if config.qkv_bias and ours.removeprefix("attention.") in ATTENTION else ("weight",)
            )
            entries += [
                Entry(
                    f"{layer_prefix.format(number)}{theirs}.{kind}", (f"layers.{number}.{ours}.{kind}",), layer=number
                )
                for kind in kinds
            ]
    entries.append(Entry(f"{prefix}norm.weight", ("norm.weight",)))
    return entries + ([] if config.tied else [Entry("lm_head.weight", ("head.weight",))])


def gguf_llama(config: LlamaConfig, rotated: bool) -> list[Entry]:
    """The tensors of llama.cpp; its `llama` architecture stores queries and keys in another rotary layout."""
    names = {
        "model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }  # fmt: skip
    turned = (".attn_q.", ".attn_k.") if rotated else ()
    return [
        replace(
            entry,
            name=names.get(entry.name, entry.name),
            join="rotated" if any(part in entry.name for part in turned) else "rows",
        )
        for entry in _llama(config, GGUF_LLAMA, "blk.{}.", "model.")
    ]


def _gpt2(config: GptConfig) -> list[Entry]:
    entries = [
        Entry("transformer.wte.weight", ("embed.weight",)),
        Entry("transformer.wpe.weight", ("positions.weight",)),
    ]
    for number in range(config.layers):
        ours, theirs = f"layers.{number}.", f"transformer.h.{number}."
        for kind in ("weight", "bias"):
            fused = tuple(f"{ours}attention.{part}.{kind}" for part in ATTENTION)
            entries += [
                Entry(f"{theirs}ln_1.{kind}", (f"{ours}attention_norm.{kind}",), layer=number),
                Entry(f"{theirs}attn.c_attn.{kind}", fused, "turned", layer=number),
                Entry(f"{theirs}attn.c_proj.{kind}", (f"{ours}attention.output.{kind}",), "turned", layer=number),
                Entry(f"{theirs}ln_2.{kind}", (f"{ours}mlp_norm.{kind}",), layer=number),
                Entry(f"{theirs}mlp.c_fc.{kind}", (f"{ours}mlp.up.{kind}",), "turned", layer=number),
                Entry(f"{theirs}mlp.c_proj.{kind}", (f"{ours}mlp.down.{kind}",), "turned", layer=number),
            ]
    entries += [Entry(f"transformer.ln_f.{kind}", (f"norm.{kind}",)) for kind in ("weight", "bias")]
    return entries + ([] if config.tied else [Entry("lm_head.weight", ("head.weight",))])


def megatron(config: Config) -> list[Entry]:
    """The tensors of megatron-core's `GPTModel`, by the names of its local layers."""
    is_gpt = isinstance(config, GptConfig)
    has_qkv_bias = isinstance(config, GptConfig) or config.qkv_bias
    kinds = ("weight", "bias") if is_gpt else ("weight",)
    qkv_kinds = ("weight", "bias") if has_qkv_bias else ("weight",)
    entries = [Entry("embedding.word_embeddings.weight", ("embed.weight",), cut=0)]
    if is_gpt:
        entries.append(Entry("embedding.position_embeddings.weight", ("positions.weight",)))
    for n in range(config.layers):
        ours, theirs = f"layers.{n}.", f"decoder.layers.{n}."
        for kind in qkv_kinds:
            qkv = tuple(f"{ours}attention.{part}.{kind}" for part in ATTENTION)
            entries.append(Entry(f"{theirs}self_attention.linear_qkv.{kind}", qkv, "groups", 0, n))
        for kind in kinds:
            fc1 = tuple(f"{ours}mlp.{part}.{kind}" for part in (("up",) if is_gpt else ("gate", "up")))
            across = 1 if kind == "weight" else None
            entries += [
                Entry(f"{theirs}input_layernorm.{kind}", (f"{ours}attention_norm.{kind}",), layer=n),
                Entry(
                    f"{theirs}self_attention.linear_proj.{kind}", (f"{ours}attention.output.{kind}",), "rows", across, n
                ),
                Entry(f"{theirs}pre_mlp_layernorm.{kind}", (f"{ours}mlp_norm.{kind}",), layer=n),
                Entry(f"{theirs}mlp.linear_fc1.{kind}", fc1, "rows", 0, n),
                Entry(f"{theirs}mlp.linear_fc2.{kind}", (f"{ours}mlp.down.{kind}",), "rows", across, n),
            ]
    entries += [Entry(f"decoder.final_layernorm.{kind}", (f"norm.{kind}",)) for kind in kinds]
    return entries + ([] if config.tied else [Entry("output_layer.weight", ("head.weight",), cut=0)])
