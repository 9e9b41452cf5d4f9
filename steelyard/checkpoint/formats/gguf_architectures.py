"""The architectures of llama.cpp, both ways: settings, tensor names, and what has no counterpart.

llama.cpp computes some values instead of reading them: the scale of Gemma's scores, and which of its layers have a
window. A model with other values is refused here, because it would load and compute something else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from steelyard.checkpoint.formats.key_mapping import Entry, hugging_face
from steelyard.checkpoint.formats.source import first_problem
from steelyard.core.errors import UserError
from steelyard.core.recipe.families.gemma import Gemma2Config, Gemma3Config, GemmaConfig
from steelyard.core.recipe.families.llama import LlamaConfig
from steelyard.core.recipe.families.qwen3 import Qwen3Config
from steelyard.core.recipe.hf_fields import HfKeys
from steelyard.core.recipe.hf_rotary import positions_of
from steelyard.core.recipe.model_section import ModelConfig, RotaryConfig
from steelyard.core.recipe.rope_scaling import RopeScaling

READ = ("llama", "qwen2", "qwen3", "gemma2", "gemma3")
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
# The number of layers for which llama.cpp takes the scale of 27B, and every how many layers have full attention.
GEMMA: dict[str, tuple[int, int]] = {"gemma2": (46, 2), "gemma3": (62, 6)}


def architecture_of(config: ModelConfig) -> str:
    """The name in llama.cpp, or an error that names what has no counterpart there."""
    if isinstance(config, GemmaConfig):
        _refuse_gemma(config)
    elif isinstance(config, Qwen3Config):
        if config.qkv_bias:
            raise _refused("model.qkv_bias = true in the family qwen3")
    elif not isinstance(config, LlamaConfig):
        raise _refused(f"the family {config.family}")
    if config.rope_share != 1:
        raise _refused(f"model.rope_share = {config.rope_share}")
    if config.rope_scaling is not None and config.rope_scaling.kind == "yarn":
        raise _refused('model.rope_scaling.kind = "yarn"')
    if isinstance(config, LlamaConfig):
        return "qwen2" if config.qkv_bias else "llama"
    return config.family


def _refuse_gemma(config: GemmaConfig) -> None:
    largest, every = GEMMA[config.family]
    scale = config.hidden // config.heads if config.layers == largest else config.head_dim
    if config.query_scale != scale:
        raise _refused(f"model.query_scale = {config.query_scale} (llama.cpp computes {scale})")
    if config.full_every != every:
        raise _refused(f"model.full_every = {config.full_every} (llama.cpp has {every})")
    if isinstance(config, Gemma2Config):
        if not config.attention_softcap or not config.logit_softcap:
            raise _refused("a softcap of 0 in the family gemma2")
        if not config.tied:
            raise _refused("model.tied = false in the family gemma2")


def config_of(settings: dict[str, Any], tied: bool, where: str) -> RotaryConfig:
    """The model that the settings of a file describe."""
    name = settings.get("general.architecture")
    if name not in READ:
        raise UserError(
            f"the architecture {name} is not supported", where=where, hint=f"supported are {', '.join(READ)}"
        )

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
        if name in GEMMA:
            return _gemma(str(name), fields, setting)
        if name == "qwen3":
            return Qwen3Config(family="qwen3", **fields)
        return LlamaConfig(family="llama", qkv_bias=name == "qwen2", **fields)
    except (ValueError, TypeError, ZeroDivisionError) as error:
        raise UserError(f"the settings do not describe a valid model: {first_problem(error)}", where=where) from None


def _gemma(name: str, fields: dict[str, Any], setting: Callable[..., Any]) -> GemmaConfig:
    largest, every = GEMMA[name]
    scale = fields["hidden"] // fields["heads"] if fields["layers"] == largest else fields["head_dim"]
    window = setting("attention.sliding_window", 4096 if name == "gemma2" else None)
    fields |= {"query_scale": scale, "full_every": every, "window": window}
    if name == "gemma3":
        local = float(setting("rope.freq_base_swa", 10000.0))
        return Gemma3Config(family="gemma3", local_rope_theta=local, **fields)
    caps = setting("attn_logit_softcapping", 50.0), setting("final_logit_softcapping", 30.0)
    return Gemma2Config(family="gemma2", attention_softcap=caps[0], logit_softcap=caps[1], **fields)


def _refused(what: str) -> UserError:
    return UserError(f"{what} has no counterpart in GGUF", hint=f"supported are {SUPPORTED}; or convert to hf")


def settings_of(config: ModelConfig, extra: dict[str, Any]) -> dict[str, int | float | str]:
    """The settings of the model, without the name of the architecture before each."""
    assert isinstance(config, RotaryConfig)
    settings: dict[str, int | float | str] = {
        "block_count": config.layers,
        "context_length": context_of(config, extra),
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
    if isinstance(config, GemmaConfig):
        settings["attention.sliding_window"] = config.window
    if isinstance(config, Gemma2Config):
        settings |= {
            "attn_logit_softcapping": config.attention_softcap,
            "final_logit_softcapping": config.logit_softcap,
        }
    if isinstance(config, Gemma3Config):
        settings["rope.freq_base_swa"] = float(config.local_rope_theta)
    return settings


def context_of(config: RotaryConfig, extra: dict[str, Any]) -> int:
    """The maximum sequence length. llama.cpp has no windows in these architectures, except in Gemma.

    Within one window, full attention computes the same.
    """
    positions = positions_of(config, extra)
    window = None if isinstance(config, GemmaConfig) else getattr(config, "window", None)
    return min(positions, window) if window else positions


def entries_of(config: ModelConfig, architecture: str) -> list[Entry]:
    """The tensors; the architecture `llama` stores queries and keys in another rotary layout."""
    turned = (".attn_q.", ".attn_k.") if architecture == "llama" else ()
    return [
        replace(entry, join="rotated" if any(part in entry.name for part in turned) else "rows")
        for entry in hugging_face(config, KEYS)
    ]
