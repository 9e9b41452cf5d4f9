"""Convert between Hugging Face's config.json and Steelyard's model config.

Settings that our families do not support (sliding windows, other activations, other rotary scalings) are rejected by
name: a model that loads and computes other logits is worse than one that does not load.
"""

from __future__ import annotations

from typing import Any

import torch
from pydantic import ValidationError

from steelyard.checkpoint.formats.hf_metadata import DROPOUT, SPECIAL, validated
from steelyard.checkpoint.formats.source import first_problem
from steelyard.core.errors import UserError
from steelyard.core.recipe.model_section import GptConfig, LlamaConfig, RopeScaling

Config = GptConfig | LlamaConfig
LLAMAS = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM")
MISTRAL = LLAMAS[1]
GPTS = ("GPT2LMHeadModel",)
TANH_GELU = ("gelu_new", "gelu_pytorch_tanh")
LLAMA3 = {
    "factor": "factor", "low_freq_factor": "low_freq_factor", "high_freq_factor": "high_freq_factor",
    "original_positions": "original_max_position_embeddings",
}  # fmt: skip


def config_from_hf(hf: dict[str, Any], where: str) -> Config:
    """The model config of a config.json."""
    name = _architecture(hf)
    if name not in (*LLAMAS, *GPTS):
        raise UserError(
            f"the architecture {name or 'unnamed'} is not supported",
            where=where,
            hint=f"supported are {', '.join((*LLAMAS, *GPTS))}",
        )
    try:
        config = _gpt(hf, where) if name in GPTS else _llama(hf, name, where)
    except KeyError as error:
        raise UserError(f"the key {error} is missing", where=where) from None
    except (ValidationError, TypeError, ValueError) as error:
        raise UserError(f"it does not describe a valid model: {first_problem(error)}", where=where) from None
    return config


def _architecture(hf: dict[str, Any]) -> str | None:
    architectures = hf.get("architectures") or [{"llama": LLAMAS[0], "gpt2": GPTS[0]}.get(str(hf.get("model_type")))]
    return architectures[0] if isinstance(architectures, list) and architectures else None


def extra_of(hf: dict[str, Any], generation: dict[str, Any] | None) -> dict[str, Any]:
    """The settings of a config.json that the model config does not have."""
    named = _architecture(hf)
    usual = dict.fromkeys(DROPOUT[:3], 0.1) if named in GPTS else {}  # The default of transformers.
    return validated(
        {
            **hf,
            "positions": hf.get("max_position_embeddings"),
            "generation_config": generation,
            "architecture": named if named == MISTRAL else None,
            "dropout": {key: hf.get(key, usual.get(key)) for key in DROPOUT},
        }
    )


def _llama(hf: dict[str, Any], architecture: str, where: str) -> LlamaConfig:
    _refuse(hf, where, hidden_act="silu", mlp_bias=False)
    if architecture != "Qwen2ForCausalLM":
        _refuse(hf, where, attention_bias=False)
    window = hf.get("sliding_window")
    if window and hf.get("use_sliding_window", True) and window < hf.get("max_position_embeddings", 0):
        raise UserError(f"its attention has a sliding window of {window} tokens, which is not supported", where=where)
    rope = {**_table(hf, "rope_scaling", where), **_table(hf, "rope_parameters", where)}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise UserError(
            f"rope_scaling: rotary positions of the type {kind} are not supported",
            where=where,
            hint="supported are default and llama3",
        )
    theta = rope.get("rope_theta", hf.get("rope_theta", 10000.0))
    heads = hf["num_attention_heads"]
    return LlamaConfig(
        family="llama",
        layers=hf["num_hidden_layers"],
        hidden=hf["hidden_size"],
        heads=heads,
        kv_heads=hf.get("num_key_value_heads") or heads,
        head_dim=hf.get("head_dim") or hf["hidden_size"] // (heads or 1),
        ffn=hf["intermediate_size"],
        vocab=hf["vocab_size"],
        rope_theta=float(theta),
        rope_scaling=_llama3(rope, where) if kind == "llama3" else None,
        qkv_bias=architecture == "Qwen2ForCausalLM",
        tied=hf.get("tie_word_embeddings", False),
        norm_eps=float(hf.get("rms_norm_eps", 1e-6)),
        init_std=float(hf.get("initializer_range", 0.02)),
    )


def _table(hf: dict[str, Any], key: str, where: str) -> dict[str, Any]:
    value = hf.get(key) or {}
    if not isinstance(value, dict):
        raise UserError(f"{key} is {value!r}, but must be a table", where=where)
    return value


def _llama3(rope: dict[str, Any], where: str) -> RopeScaling:
    for theirs in LLAMA3.values():
        if type(rope.get(theirs)) not in (int, float) or rope[theirs] <= 0:
            problem = f"is {rope[theirs]!r}" if theirs in rope else "is missing"
            raise UserError(f"rope_scaling.{theirs} {problem}, but must be a number above 0", where=where)
    values = {ours: rope[theirs] for ours, theirs in LLAMA3.items()}
    scale = {key: float(value) for key, value in values.items() if key != "original_positions"}
    return RopeScaling(original_positions=values["original_positions"], **scale)


def _gpt(hf: dict[str, Any], where: str) -> GptConfig:
    if hf.get("activation_function", TANH_GELU[0]) not in TANH_GELU:
        _refuse(hf, where, activation_function=TANH_GELU[0])
    _refuse(hf, where, scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False)
    return GptConfig(
        family="gpt",
        layers=hf["n_layer"],
        hidden=hf["n_embd"],
        heads=hf["n_head"],
        ffn=hf.get("n_inner") or 4 * hf["n_embd"],
        positions=hf["n_positions"],
        vocab=hf["vocab_size"],
        tied=hf.get("tie_word_embeddings", True),
        norm_eps=float(hf.get("layer_norm_epsilon", 1e-5)),
        init_std=float(hf.get("initializer_range", 0.02)),
    )


def _refuse(hf: dict[str, Any], where: str, **supported: Any) -> None:
    for key, value in supported.items():
        if hf.get(key, value) != value:
            raise UserError(f"{key} is {hf[key]}, but only {value} is supported", where=where)


def config_to_hf(config: Config, dtype: torch.dtype, extra: dict[str, Any]) -> dict[str, Any]:
    """The config.json of a model config. `extra` has the rest: positions, special tokens, dropout, architecture."""
    special = {key: extra[key] for key in SPECIAL if extra.get(key) is not None}
    dropout = extra.get("dropout") or {}
    common = {
        "torch_dtype": str(dtype).removeprefix("torch."),
        "vocab_size": config.vocab,
        "tie_word_embeddings": config.tied,
        "initializer_range": config.init_std,
        "use_cache": True,
        # Without these keys transformers would use default ids.
        **{key: special.get(key) for key in SPECIAL},
    }
    if isinstance(config, GptConfig):
        return {
            "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": config.hidden,
            "n_layer": config.layers, "n_head": config.heads, "n_inner": config.ffn, "n_positions": config.positions,
            "n_ctx": config.positions, "activation_function": "gelu_new", "layer_norm_epsilon": config.norm_eps,
            "attn_pdrop": config.attention_dropout, "embd_pdrop": config.dropout,
            "resid_pdrop": config.dropout, **common,
        } | {key: value for key, value in dropout.items() if key != "attention_dropout"}  # fmt: skip
    is_mistral = extra.get("architecture") == MISTRAL and not config.qkv_bias
    architecture, kind = ("Qwen2ForCausalLM", "qwen2") if config.qkv_bias else ("LlamaForCausalLM", "llama")
    if is_mistral:
        architecture, kind = MISTRAL, "mistral"
    hf = {
        "architectures": [architecture], "model_type": kind, "hidden_size": config.hidden,
        "num_hidden_layers": config.layers, "num_attention_heads": config.heads, "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim, "intermediate_size": config.ffn, "hidden_act": "silu",
        "max_position_embeddings": positions_of(config, extra), "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta, "rope_scaling": _rope_scaling(config),
        "attention_dropout": dropout.get("attention_dropout", config.attention_dropout), **common,
    }  # fmt: skip
    if is_mistral:
        return hf | {"sliding_window": None}
    return hf | ({"use_sliding_window": False} if config.qkv_bias else {"attention_bias": False, "mlp_bias": False})


def positions_of(config: Config, extra: dict[str, Any]) -> int:
    """The maximum sequence length of the model."""
    if isinstance(config, GptConfig):
        return config.positions
    if extra.get("positions"):
        return int(extra["positions"])
    scaling = config.rope_scaling
    return int(scaling.factor * scaling.original_positions) if scaling else 2048


def _rope_scaling(config: LlamaConfig) -> dict[str, Any] | None:
    if config.rope_scaling is None:
        return None
    return {"rope_type": "llama3", **{theirs: getattr(config.rope_scaling, ours) for ours, theirs in LLAMA3.items()}}
