"""The architectures of llama.cpp, both ways: settings, tensor names, and what has no counterpart.

What only one family has is in its file (`from_gguf`, `to_gguf`). llama.cpp computes some values instead of reading
them, such as the scale of Gemma's scores. A model with other values is refused, because it would load and compute
something else.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from steelyard.checkpoint.formats.key_mapping import Entry, hugging_face
from steelyard.checkpoint.formats.source import first_problem
from steelyard.core.errors import UserError
from steelyard.core.recipe import families
from steelyard.core.recipe.hf_fields import HfKeys
from steelyard.core.recipe.hf_rotary import positions_of
from steelyard.core.recipe.model_section import ModelConfig, RotaryConfig
from steelyard.core.recipe.rope_scaling import RopeScaling

SUPPORTED = "Llama, Mistral, Qwen2, Qwen3, Gemma 2 and Gemma 3"
KEYS = HfKeys(
    {
        "attention_norm": "attn_norm", "attention.query": "attn_q", "attention.key": "attn_k",
        "attention.value": "attn_v", "attention.output": "attn_output", "attention.query_norm": "attn_q_norm",
        "attention.key_norm": "attn_k_norm", "attention_post_norm": "post_attention_norm", "mlp_norm": "ffn_norm",
        "mlp.gate": "ffn_gate", "mlp.up": "ffn_up", "mlp.down": "ffn_down", "mlp_post_norm": "post_ffw_norm",
    },
    embed="token_embd", norm="output_norm", head="output", layer="blk.{}.",
)  # fmt: skip


def architecture_of(config: ModelConfig) -> str:
    """The name in llama.cpp, or an error that names what has no counterpart there."""
    try:
        name, _ = config.to_gguf()
    except ValueError as error:
        raise _refused(str(error)) from None
    for layer in config.blocks.layers:
        rope = layer.attention.rope
        if rope is None or rope.width != layer.attention.head_dim:
            raise _refused("model.rope_share below 1")
        if rope.scaling is not None and rope.scaling.kind == "yarn":
            raise _refused('model.rope_scaling.kind = "yarn"')
    return name


def config_of(settings: dict[str, Any], tied: bool, where: str) -> RotaryConfig:
    """The model that the settings of a file describe."""
    name = settings.get("general.architecture")
    family = families.of_gguf(name)
    if family is None:
        known = ", ".join(families.gguf_architectures())
        raise UserError(f"the architecture {name} is not supported", where=where, hint=f"supported are {known}")

    def setting(key: str, default: Any = None) -> Any:
        value = settings.get(f"{name}.{key}", default)
        if value is None:
            raise UserError(f"the setting {name}.{key} is missing", where=where)
        return value

    scaling = settings.get(f"{name}.rope.scaling.type", "none")
    if settings.get(f"{name}.expert_count") or scaling not in ("none", "linear"):
        raise UserError("experts and rotary positions scaled by YaRN are not supported in GGUF", where=where)
    try:
        heads, hidden = setting("attention.head_count"), setting("embedding_length")
        fields = {
            "layers": setting("block_count"),
            "hidden": hidden,
            "heads": heads,
            "kv_heads": setting("attention.head_count_kv", heads),
            "head_dim": setting("attention.key_length", hidden // heads),
            "ffn": setting("feed_forward_length"),
            "vocab": setting("vocab_size", len(settings.get("tokenizer.ggml.tokens", ())) or None),
            "rope_theta": float(setting("rope.freq_base", 10000.0)),
            # fp32 in the file: 1e-5 is read as 9.999999747e-06.
            "norm_eps": float(f"{setting('attention.layer_norm_rms_epsilon'):.6g}"),
            "tied": tied,
        }
        if scaling == "linear":
            fields["rope_scaling"] = RopeScaling(kind="linear", factor=float(setting("rope.scaling.factor")))
        config = family.from_gguf(str(name), fields, setting)
    except (ValueError, TypeError, ZeroDivisionError) as error:
        raise UserError(f"the settings do not describe a valid model: {first_problem(error)}", where=where) from None
    assert isinstance(config, RotaryConfig)
    return config


def _refused(what: str) -> UserError:
    return UserError(f"{what} has no counterpart in GGUF", hint=f"supported are {SUPPORTED}; or convert to hf")


def settings_of(config: ModelConfig, metadata: dict[str, Any]) -> dict[str, int | float | str]:
    """The settings of the model, without the name of the architecture before each."""
    assert isinstance(config, RotaryConfig)
    settings: dict[str, int | float | str] = {
        "block_count": config.layers,
        "context_length": context_of(config, metadata),
        "embedding_length": config.hidden,
        "feed_forward_length": config.ffn,
        "attention.head_count": config.heads,
        "attention.head_count_kv": config.kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": float(config.norm_eps),
        "rope.dimension_count": config.head_dim,
        "rope.freq_base": float(config.rope_theta),
        "vocab_size": config.vocab,
    }
    if config.rope_scaling is not None and config.rope_scaling.kind == "linear":
        settings |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(config.rope_scaling.factor)}
    return settings | config.to_gguf()[1]


def context_of(config: RotaryConfig, metadata: dict[str, Any]) -> int:
    """The maximum sequence length. llama.cpp has no windows in most of these architectures.

    Within one window, full attention computes the same.
    """
    positions = positions_of(config, metadata)
    window = config.blocks.layers[0].attention.window
    is_written = "attention.sliding_window" in config.to_gguf()[1]
    return positions if window is None or is_written else min(positions, window)


def entries_of(config: ModelConfig, architecture: str) -> list[Entry]:
    """The tensors; the architecture `llama` stores queries and keys in another rotary layout."""
    turned = (".attn_q.", ".attn_k.") if architecture == "llama" else ()
    return [
        replace(entry, join="rotated" if any(part in entry.name for part in turned) else "rows")
        for entry in hugging_face(config, KEYS)
    ]
