"""Convert between Megatron's saved args and Steelyard's model config.

This module also maps the tensor names of all Megatron versions to those of megatron-core's local layers.
"""

from __future__ import annotations

import argparse
import math
import re
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from steelyard.checkpoint.formats import megatron_moe_args
from steelyard.checkpoint.formats.hf_config import positions_of
from steelyard.checkpoint.formats.megatron_layout import MegatronLayout
from steelyard.checkpoint.formats.source import first_problem
from steelyard.core.errors import UserError
from steelyard.core.recipe.blocks import PRE_NORM, ExpertsBlock, ModelBlocks
from steelyard.core.recipe.families.gpt import GptConfig
from steelyard.core.recipe.families.llama import LlamaConfig
from steelyard.core.recipe.families.moe import MixtralConfig, Qwen3MoeConfig
from steelyard.core.recipe.families.qwen3 import Qwen3Config
from steelyard.core.recipe.model_section import ModelConfig, RotaryConfig
from steelyard.core.recipe.rope_scaling import RopeScaling

LATEST = "latest_checkpointed_iteration.txt"
# Applied in order, oldest first. Transformer Engine stores a norm in the linear layer that follows it.
RENAMED = (
    (r"^(model\d*\.|module\.|language_model\.)+", ""),
    (r"^(encoder|transformer)\.", "decoder."),
    (r"\.attention\.", ".self_attention."),
    (r"\.input_norm\.", ".input_layernorm."),
    (r"\.post_attention_(layer)?norm\.", ".pre_mlp_layernorm."),
    (r"\.final_norm\.", ".final_layernorm."),
    (r"\.query_key_value\.", ".linear_qkv."),
    (r"\.self_attention\.dense\.", ".self_attention.linear_proj."),
    (r"\.dense_h_to_4h\.", ".linear_fc1."),
    (r"\.dense_4h_to_h\.", ".linear_fc2."),
    (r"\.self_attention\.linear_qkv\.layer_norm_", ".input_layernorm."),
    (r"\.mlp\.linear_fc1\.layer_norm_", ".pre_mlp_layernorm."),
    (r"\.mlp\.experts\.(linear_fc[12])\.weight(\d+)$", r".mlp.experts.local_experts.\2.\1.weight"),
    (r"^(word_embeddings_for_head|word_embeddings_head|lm_head)\.", "output_layer."),
)
NOT_WEIGHTS = re.compile(
    r"(_extra_state|inv_freq|tokens_per_expert)(/.*)?$|^(optimizer|chained_|opt_param|rng_state|rerun_state)"
)
REFUSED = {
    "multi_latent_attention": "latent attention",
    "rotary_interleaved": "interleaved rotary positions",
    "apply_layernorm_1p": "norms stored as weight - 1",
    "squared_relu": "squared ReLU", "parallel_attn": "parallel attention", "window_size": "sliding windows",
    "mtp_num_layers": "multi-token prediction",
}  # fmt: skip
# Families with rotary positions, by whether they have experts, and norms of queries and keys.
FAMILIES: dict[tuple[bool, bool], tuple[str, type[RotaryConfig]]] = {
    (False, False): ("llama", LlamaConfig), (False, True): ("qwen3", Qwen3Config),
    (True, False): ("mixtral", MixtralConfig), (True, True): ("qwen3-moe", Qwen3MoeConfig),
}  # fmt: skip


def renamed(name: str) -> str:
    """The name of a tensor in megatron-core's local layers."""
    for pattern, name_now in RENAMED:
        name = re.sub(pattern, name_now, name)
    return name


def iteration_folder(path: Path) -> tuple[Path, Path]:
    """The folder of the iteration at a path, or of the newest one, and its parent."""
    latest = path / LATEST
    if not latest.is_file():
        return path, path.parent
    text = latest.read_text(encoding="utf-8", errors="replace").strip()
    if text != "release" and not re.fullmatch(r"\d{1,12}", text):
        raise UserError(f"its content is {text[:50]!r}, which is not an iteration", where=str(latest))
    return path / ("release" if text == "release" else f"iter_{int(text):07d}"), path


def config_from_args(args: dict[str, Any], where: str) -> ModelConfig:
    """The config of the model that was trained with these args."""
    if not args:
        raise UserError("it has no args, which describe the model", where=where)
    for key, what in REFUSED.items():
        if args.get(key):
            raise UserError(f"{what} ({key} = {args[key]}) are not supported", where=where)
    if args.get("rotary_seq_len_interpolation_factor") not in (1, 1.0, None):
        factor = args["rotary_seq_len_interpolation_factor"]
        raise UserError(f"position interpolation by {factor} is not supported", where=where)
    if args.get("rotary_percent", 1.0) not in (1, 1.0, None):
        raise UserError(f"rotary_percent is {args['rotary_percent']}, but only 1 is supported", where=where)
    kind = args.get("position_embedding_type")
    is_rope = kind == "rope" or bool(args.get("use_rotary_position_embeddings"))
    expected = {"swiglu": is_rope, "normalization": "rmsnorm" if is_rope else "layernorm"}
    for key, value in expected.items():
        given = args.get(key, value)
        if (given.lower() if isinstance(given, str) else given) != value:
            positions = "rotary" if is_rope else "learned"
            raise UserError(
                f"{key} is {args[key]} with {positions} positions, which is neither GPT nor Llama", where=where
            )
    try:
        config: ModelConfig = _rotary(args, where) if is_rope else _gpt(args)
    except KeyError as error:
        raise UserError(f"{error} is missing in its args", where=where) from None
    except (ValidationError, TypeError, ValueError) as error:
        raise UserError(f"its args do not describe a valid model: {first_problem(error)}", where=where) from None
    return config


def _common(args: dict[str, Any]) -> dict[str, Any]:
    padded = args.get("padded_vocab_size") or 0
    vocab = args.get("vocab_size") or padded
    return {
        "layers": args["num_layers"],
        "hidden": args["hidden_size"],
        "heads": args["num_attention_heads"],
        "ffn": args.get("ffn_hidden_size") or 4 * args["hidden_size"],
        "vocab": min(vocab, padded) if padded else vocab,
        "tied": not args.get("untie_embeddings_and_output_weights", False),
        "norm_eps": float(args.get("norm_epsilon") or args.get("layernorm_epsilon") or 1e-5),
        "init_std": float(args.get("init_method_std") or 0.02),
    }


def _gpt(args: dict[str, Any]) -> GptConfig:
    return GptConfig(family="gpt", positions=args["max_position_embeddings"], **_common(args))


def _rotary(args: dict[str, Any], where: str) -> RotaryConfig:
    """Llama; with experts Mixtral; with norms of queries and keys Qwen3."""
    has_experts = megatron_moe_args.has_experts(args, where)
    if has_experts:
        megatron_moe_args.refuse_to_read(args, where)
    family, config = FAMILIES[has_experts, bool(args.get("qk_layernorm"))]
    keys = _rotary_keys(args) | (megatron_moe_args.keys_from_args(args) if has_experts else {})
    if args.get("add_qkv_bias") and family != "llama":
        raise UserError("biases of queries, keys and values (add_qkv_bias) are supported only in llama", where=where)
    if family == "llama":
        keys["qkv_bias"] = bool(args.get("add_qkv_bias", False))
    return config.model_validate({"family": family, **keys})


def _rotary_keys(args: dict[str, Any]) -> dict[str, Any]:
    heads = args["num_attention_heads"]
    grouped = args.get("group_query_attention") or args.get("num_key_value_heads")
    scaling = None
    if args.get("use_rope_scaling"):
        # Only the factor is a Megatron argument. The rest are constants in its code, but args that we wrote have them.
        scaling = RopeScaling(
            factor=float(args.get("rope_scaling_factor") or 8.0),
            low_freq_factor=float(args.get("rope_low_freq_factor") or 1.0),
            high_freq_factor=float(args.get("rope_high_freq_factor") or 4.0),
            original_positions=int(args.get("rope_original_max_position_embeddings") or 8192),
        )
    return {
        "kv_heads": (args.get("num_query_groups") or args.get("num_key_value_heads") or heads) if grouped else heads,
        "head_dim": args.get("kv_channels") or args["hidden_size"] // (heads or 1),
        "rope_theta": float(args.get("rotary_base") or args.get("rope_theta") or 10000.0),
        "rope_scaling": scaling,
        **_common(args),
    }


def padded_rows(vocab: int, tensor: int, multiple: int = 128) -> int:
    """The rows of Megatron's embedding: padded to a multiple of `multiple` x tensor parallel size."""
    step = multiple * tensor
    return math.ceil(vocab / step) * step


def refuse_to_write(config: ModelConfig) -> None:
    """Raise if Megatron's args cannot describe a model."""
    what = _not_writable(config.blocks)
    if what is not None:
        raise UserError(f"{what} cannot be written for Megatron", hint="write --to hf or --to steelyard")


def _not_writable(blocks: ModelBlocks) -> str | None:
    layer = blocks.layers[0]
    attention, mlp, rope = layer.attention, layer.mlp, layer.attention.rope
    is_gpt = layer.norm.kind == "layer" and blocks.positions is not None and not mlp.gated and mlp.activation == "gelu"
    is_llama = layer.norm.kind == "rms" and rope is not None and mlp.gated and mlp.activation == "silu"
    checks = {
        "attention that differs between layers": any(each.attention != attention for each in blocks.layers),
        "sliding windows": attention.window is not None,
        "soft caps": attention.softcap is not None or blocks.logit_softcap is not None,
        "norms after attention or MLP": layer.norm_places != PRE_NORM,
        "norms of all queries or keys together": attention.norm is not None
        and attention.norm.width != attention.head_dim,
        "norms stored as weight - 1": layer.norm.is_offset,
        "a scale of scores or of the embedding": attention.scale is not None or blocks.embed_scale is not None,
        "norms, positions and MLP neither of GPT nor of Llama": not (is_gpt or is_llama),
        "rotary positions of a part of each head": rope is not None and rope.width != attention.head_dim,
        "a bias of the output of attention, but none of the MLP,": attention.output_bias != mlp.bias,
    }
    if rope is not None and rope.scaling is not None:
        checks[f"RoPE scaling of the kind {rope.scaling.kind}"] = rope.scaling.kind != "llama3"
    experts = (each.mlp for each in blocks.layers if isinstance(each.mlp, ExpertsBlock))
    return next((what for what, is_so in checks.items() if is_so), None) or next(
        (what for each in experts if (what := megatron_moe_args.not_writable(each.routing))), None
    )


def args_of(
    config: ModelConfig, dtype: torch.dtype, metadata: dict[str, Any], layout: MegatronLayout
) -> argparse.Namespace:
    """The args to save with a checkpoint of this config, by Megatron's names."""
    refuse_to_write(config)
    positions, tensor = positions_of(config, metadata), layout.tensor
    args: dict[str, Any] = {
        "num_layers": config.layers, "hidden_size": config.hidden, "num_attention_heads": config.heads,
        "ffn_hidden_size": config.ffn, "vocab_size": config.vocab,
        "padded_vocab_size": padded_rows(config.vocab, tensor),
        "make_vocab_size_divisible_by": 128, "max_position_embeddings": positions, "seq_length": positions,
        "norm_epsilon": config.norm_eps, "layernorm_epsilon": config.norm_eps, "init_method_std": config.init_std,
        "untie_embeddings_and_output_weights": not config.tied, "tensor_model_parallel_size": tensor,
        "pipeline_model_parallel_size": layout.pipeline, "encoder_num_layers": config.layers,
        "encoder_seq_length": positions,
        "hidden_dropout": config.dropout, "attention_dropout": config.attention_dropout,
        "fp16": dtype == torch.float16, "bf16": dtype == torch.bfloat16, "params_dtype": dtype,
        "transformer_impl": "transformer_engine" if layout.engine else "local", "use_mcore_models": True,
        "virtual_pipeline_model_parallel_size": None, "consumed_train_samples": 0, "consumed_valid_samples": 0,
        "iteration": 1,
    }  # fmt: skip
    layer = config.blocks.layers[0]
    attention, mlp = layer.attention, layer.mlp
    args |= {
        "position_embedding_type": "learned_absolute" if attention.rope is None else "rope",
        "normalization": "LayerNorm" if layer.norm.kind == "layer" else "RMSNorm", "swiglu": mlp.gated,
        "add_bias_linear": mlp.bias, "add_qkv_bias": attention.qkv_bias, "kv_channels": attention.head_dim,
        "group_query_attention": attention.kv_heads != attention.heads,
        "num_query_groups": 1 if attention.rope is None else attention.kv_heads,
    }  # fmt: skip
    if attention.rope is not None:
        scaling = attention.rope.scaling
        args |= {
            "use_rotary_position_embeddings": True, "rotary_percent": 1.0, "rotary_interleaved": False,
            "rotary_base": _whole(attention.rope.theta), "qk_layernorm": attention.norm is not None,
            "use_rope_scaling": scaling is not None, "rope_scaling_factor": scaling.factor if scaling else 8.0,
        }  # fmt: skip
        if scaling is not None:
            args |= {
                "rope_low_freq_factor": scaling.low_freq_factor, "rope_high_freq_factor": scaling.high_freq_factor,
                "rope_original_max_position_embeddings": scaling.original_positions,
            }  # fmt: skip
    has_experts = [isinstance(each.mlp, ExpertsBlock) for each in config.blocks.layers]
    if any(has_experts):
        experts = config.blocks.layers[has_experts.index(True)].mlp
        assert isinstance(experts, ExpertsBlock)
        args |= megatron_moe_args.args_of_experts(experts, has_experts, tensor, layout.grouped)
    return argparse.Namespace(**args)


def _whole(number: float) -> float:
    """An int if the number is integral, as Megatron's rotary_base is."""
    return int(number) if number == int(number) else number
