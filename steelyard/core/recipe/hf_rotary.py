"""Fields of Hugging Face's config.json that all families with RoPE share."""

from __future__ import annotations

from typing import Any

from steelyard.core.errors import UserError
from steelyard.core.recipe.hf_fields import HfFields
from steelyard.core.recipe.model_section import RotaryConfig
from steelyard.core.recipe.rope_scaling import RopeScaling

SLIDING, FULL = "sliding_attention", "full_attention"
KINDS = ("default", "linear", "llama3", "yarn")
# Our keys and theirs, by kind of scaling.
SCALING = {
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor", "low_freq_factor": "low_freq_factor", "high_freq_factor": "high_freq_factor",
        "original_positions": "original_max_position_embeddings",
    },
    "yarn": {
        "factor": "factor", "original_positions": "original_max_position_embeddings", "beta_fast": "beta_fast",
        "beta_slow": "beta_slow", "attention_factor": "attention_factor", "truncate": "truncate",
    },
}  # fmt: skip
OPTIONAL = ("beta_fast", "beta_slow", "attention_factor", "truncate")


def rotary_fields(
    hf: HfFields,
    activation: str = "hidden_act",
    eps: float = 1e-6,
    tied: bool = False,
    theta: float = 10000.0,
    head_dim: int | None = None,
) -> dict[str, Any]:
    """The keys of `RotaryConfig` from a config.json; what is absent has the family's default in `transformers`."""
    supported = ("silu",) if activation == "hidden_act" else ("gelu_pytorch_tanh",)
    hf.only(activation, *supported)
    heads, hidden = hf.get("num_attention_heads"), hf.get("hidden_size")
    theta, scaling = rope_of(hf, {**hf.table("rope_scaling"), **hf.table("rope_parameters")}, theta)
    return {
        "layers": hf.get("num_hidden_layers"),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": hf.get("num_key_value_heads", None) or heads,
        "head_dim": hf.get("head_dim", None) or head_dim or hidden // (heads or 1),
        "ffn": hf.get("intermediate_size"),
        "vocab": hf.get("vocab_size"),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "tied": hf.get("tie_word_embeddings", tied),
        "norm_eps": float(hf.get("rms_norm_eps", eps)),
        "init_std": float(hf.get("initializer_range", 0.02)),
    }


def rope_of(hf: HfFields, rope: dict[str, Any], theta: float = 10000.0) -> tuple[float, RopeScaling | None]:
    """Theta and scaling of a table of RoPE settings. Theta may be outside the table."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in KINDS:
        raise UserError(
            f"rope_scaling: rotary positions of the type {kind} are not supported",
            where=hf.where,
            hint=f"supported are {', '.join(KINDS)}",
        )
    beside, share = hf.get("rope_theta", None), hf.get("partial_rotary_factor", None)
    theta = float(rope.get("rope_theta") or beside or theta)
    keys = SCALING.get(kind, {})
    partial = float(rope.get("partial_rotary_factor") or share or 1)
    if partial != 1:
        raise UserError(f"partial_rotary_factor is {partial}, but only 1 is supported", where=hf.where)
    positions = hf.get("max_position_embeddings", None)
    known = {*keys.values(), "rope_type", "type", "rope_theta", "partial_rotary_factor"}
    # Some files state the original positions although they are not used.
    known |= {"original_max_position_embeddings"}
    if unknown := sorted(key for key, value in rope.items() if key not in known and value is not None):
        raise UserError(f"rope_scaling.{unknown[0]} is not supported", where=hf.where)
    if kind == "default":
        return theta, None
    values: dict[str, Any] = {}
    for ours, theirs in keys.items():
        value: Any = rope.get(theirs)
        if value is None and kind == "yarn" and ours == "original_positions":
            value = positions
        if value is None and ours in OPTIONAL:
            continue
        if ours != "truncate" and (type(value) not in (int, float) or value <= 0):
            problem = f"is {value!r}" if theirs in rope else "is missing"
            raise UserError(f"rope_scaling.{theirs} {problem}, but must be a number above 0", where=hf.where)
        values[ours] = value if ours in ("original_positions", "truncate") else float(value)
    return theta, RopeScaling(kind=kind, **values)


def window_of(hf: HfFields, uses: bool | None = None, default: int | None = None) -> int | None:
    """The sliding window of a family in which all layers have one, or none.

    `uses`: the default of `use_sliding_window`, if the family has this setting; then `max_window_layers` layers have
    full attention.
    """
    window: int | None = hf.get("sliding_window", default)
    types, layers = hf.listed("layer_types"), hf.get("num_hidden_layers")
    first = 0
    if uses is not None:
        uses, first = hf.get("use_sliding_window", uses), hf.get("max_window_layers", 28)
        window = window if uses else None
    if types is not None:
        if types not in ([SLIDING] * layers, [FULL] * layers):
            raise UserError("layer_types: all layers must have a sliding window, or none", where=hf.where)
        return window if types[0] == SLIDING else None
    if window and 0 < first < layers:
        raise UserError(f"max_window_layers is {first}, but only 0 or all layers is supported", where=hf.where)
    return window if window and first < layers else None


def full_every_of(hf: HfFields, default: int) -> int:
    """N, if every N-th layer attends to all tokens and the others have a sliding window."""
    types, layers = hf.listed("layer_types"), hf.get("num_hidden_layers")
    every = int(hf.get("sliding_window_pattern", None) or hf.get("_sliding_window_pattern", None) or default)
    if types is None:
        return every
    every = types.index(FULL) + 1 if FULL in types else layers + 1
    if types != layer_types(layers, every):
        raise UserError("layer_types: full attention must be in every N-th layer", where=hf.where)
    return every


def layer_types(layers: int, every: int) -> list[str]:
    """The kinds of attention of all layers, if every N-th attends to all tokens."""
    return [SLIDING if (number + 1) % every else FULL for number in range(layers)]


def rotary_config(config: RotaryConfig, metadata: dict[str, Any]) -> dict[str, Any]:
    """The config.json of the keys of `RotaryConfig`."""
    if config.rope_share != 1:
        raise UserError(
            f"model.rope_share = {config.rope_share} has no counterpart in {config.architectures[0]} of transformers",
            hint="convert to steelyard, or train without this key",
        )
    return {
        "hidden_size": config.hidden, "num_hidden_layers": config.layers, "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads, "head_dim": config.head_dim, "intermediate_size": config.ffn,
        "hidden_act": "silu", "max_position_embeddings": positions_of(config, metadata),
        "rms_norm_eps": config.norm_eps, "rope_theta": config.rope_theta,
        "rope_scaling": scaling_to_hf(config.rope_scaling),
        "attention_dropout": (metadata.get("dropout") or {}).get("attention_dropout", config.attention_dropout),
    }  # fmt: skip


def positions_of(config: RotaryConfig, metadata: dict[str, Any]) -> int:
    """The maximum sequence length of the model."""
    if metadata.get("positions"):
        return int(metadata["positions"])
    scaling = config.rope_scaling
    return int(scaling.factor * scaling.original_positions) if scaling else 2048


def scaling_to_hf(scaling: RopeScaling | None) -> dict[str, Any] | None:
    """`rope_scaling` of a config.json."""
    if scaling is None:
        return None
    values = {theirs: getattr(scaling, ours) for ours, theirs in SCALING[scaling.kind].items()}
    return {"rope_type": scaling.kind, **{key: value for key, value in values.items() if value is not None}}
