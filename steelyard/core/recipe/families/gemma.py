"""Gemma 2 and the text model of Gemma 3: norms on both sides of each block, GeGLU, windows, scaled embedding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat

from steelyard.core.errors import UserError
from steelyard.core.recipe.blocks import NORM_PLACES, AttentionBlock, NormBlock
from steelyard.core.recipe.hf_fields import SANDWICH_MODULES, HfFields, HfKeys
from steelyard.core.recipe.hf_rotary import (
    FULL,
    SLIDING,
    full_every_of,
    layer_types,
    rope_of,
    rotary_config,
    rotary_fields,
)  # fmt: skip
from steelyard.core.recipe.model_section import Heads, Layers, RotaryConfig, Width
from steelyard.core.recipe.rope_scaling import Rows


class GemmaConfig(RotaryConfig):
    """Keys of both generations."""

    hf_keys: ClassVar[HfKeys] = HfKeys(SANDWICH_MODULES)
    norm_places: ClassVar[tuple[str, ...]] = NORM_PLACES
    gguf_largest: ClassVar[int]
    """The number of layers for which llama.cpp takes the scale of 27B. It computes the scale, and reads no other."""
    gguf_full_every: ClassVar[int]
    """Every how many layers have full attention in llama.cpp."""
    activation: ClassVar[Any] = "gelu"

    head_dim: Heads = 256
    tied: bool = True
    norm_eps: PositiveFloat = 1e-6
    query_scale: Width = Field(256, description="scores are divided by the square root of this")
    window: Rows = 4096
    full_every: Layers = Field(2, description="layers N, 2N, ... counted from 1 attend to all tokens")

    def attention(self, number: int) -> AttentionBlock:
        window = self.window if (number + 1) % self.full_every else None
        return replace(super().attention(number), scale=1 / self.query_scale**0.5, window=window)

    def norm(self) -> NormBlock:
        return NormBlock(self.hidden, self.norm_eps, is_offset=True)

    def ends(self) -> dict[str, Any]:
        return {"embed_scale": self.hidden**0.5}

    @classmethod
    def _from_gguf(cls, fields: dict[str, Any], window: int) -> dict[str, Any]:
        is_largest = fields["layers"] == cls.gguf_largest
        scale = fields["hidden"] // fields["heads"] if is_largest else fields["head_dim"]
        return fields | {"query_scale": scale, "full_every": cls.gguf_full_every, "window": window}

    def to_gguf(self) -> tuple[str, dict[str, int | float | str]]:
        scale = self.hidden // self.heads if self.layers == self.gguf_largest else self.head_dim
        if self.query_scale != scale:
            raise ValueError(f"model.query_scale = {self.query_scale} (llama.cpp computes {scale})")
        if self.full_every != self.gguf_full_every:
            raise ValueError(f"model.full_every = {self.full_every} (llama.cpp has {self.gguf_full_every})")
        return self.family, {"attention.sliding_window": self.window}

    @classmethod
    def _fields(cls, hf: HfFields, every: int) -> dict[str, Any]:
        hf.only("attention_bias", False)
        hf.only("use_bidirectional_attention", None, False)
        fields = rotary_fields(hf, "hidden_activation", tied=True, head_dim=256)
        hf.ignore("hidden_act", "sliding_window_size")  # Old files have both spellings; transformers uses the others.
        return fields | {
            "query_scale": hf.get("query_pre_attn_scalar", 256), "window": hf.get("sliding_window", 4096),
            "full_every": full_every_of(hf, every),
        }  # fmt: skip

    def _to_hf(self, metadata: dict[str, Any]) -> dict[str, Any]:
        hf = rotary_config(self, metadata)
        del hf["hidden_act"]
        return hf | {
            "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": self.query_scale,
            "sliding_window": self.window, "layer_types": layer_types(self.layers, self.full_every),
            "attention_bias": False,
        }  # fmt: skip


class Gemma2Config(GemmaConfig):
    """Gemma 2: soft caps of scores and logits."""

    architectures: ClassVar[tuple[str, ...]] = ("Gemma2ForCausalLM",)
    model_types: ClassVar[tuple[str, ...]] = ("gemma2",)
    gguf_architectures: ClassVar[tuple[str, ...]] = ("gemma2",)
    gguf_largest, gguf_full_every = 46, 2

    family: Literal["gemma2"]
    attention_softcap: NonNegativeFloat = Field(50.0, description="limit of the scores; 0 for none")
    logit_softcap: NonNegativeFloat = Field(30.0, description="limit of the logits; 0 for none")

    def attention(self, number: int) -> AttentionBlock:
        return replace(super().attention(number), softcap=self.attention_softcap or None)

    def ends(self) -> dict[str, Any]:
        return super().ends() | {"logit_softcap": self.logit_softcap or None}

    @classmethod
    def from_hf(cls, hf: HfFields) -> Gemma2Config:
        caps = hf.get("attn_logit_softcapping", 50.0), hf.get("final_logit_softcapping", 30.0)
        attention, logits = (0.0 if cap is None else float(cap) for cap in caps)
        return cls(family="gemma2", attention_softcap=attention, logit_softcap=logits, **cls._fields(hf, 2))

    @classmethod
    def from_gguf(cls, name: str, fields: dict[str, Any], setting: Callable[..., Any]) -> Gemma2Config:
        caps = setting("attn_logit_softcapping", 50.0), setting("final_logit_softcapping", 30.0)
        own = cls._from_gguf(fields, setting("attention.sliding_window", 4096))
        return cls(family="gemma2", attention_softcap=caps[0], logit_softcap=caps[1], **own)

    def to_gguf(self) -> tuple[str, dict[str, int | float | str]]:
        name, settings = super().to_gguf()
        if not self.attention_softcap or not self.logit_softcap:
            raise ValueError("a softcap of 0 in the family gemma2")
        if not self.tied:
            raise ValueError("model.tied = false in the family gemma2")
        caps = {"attn_logit_softcapping": self.attention_softcap, "final_logit_softcapping": self.logit_softcap}
        return name, settings | caps

    def to_hf(self, metadata: dict[str, Any]) -> dict[str, Any]:
        return {
            "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", **self._to_hf(metadata),
            "attn_logit_softcapping": self.attention_softcap or None,
            "final_logit_softcapping": self.logit_softcap or None,
        }  # fmt: skip


class Gemma3Config(GemmaConfig):
    """Gemma 3: norms of queries and keys, and another RoPE in layers with a sliding window."""

    architectures: ClassVar[tuple[str, ...]] = ("Gemma3ForCausalLM",)
    model_types: ClassVar[tuple[str, ...]] = ("gemma3_text",)
    gguf_architectures: ClassVar[tuple[str, ...]] = ("gemma3",)
    gguf_largest, gguf_full_every = 62, 6

    family: Literal["gemma3"]
    full_every: Layers = 6
    rope_theta: PositiveFloat = 1000000.0
    local_rope_theta: PositiveFloat = Field(10000.0, description="rope_theta of layers with a sliding window")

    def attention(self, number: int) -> AttentionBlock:
        attention = super().attention(number)
        rope = (
            self.rope() if attention.window is None else replace(self.rope(), theta=self.local_rope_theta, scaling=None)
        )
        return replace(attention, rope=rope, norm=NormBlock(self.head_dim, self.norm_eps, is_offset=True))

    @classmethod
    def from_hf(cls, hf: HfFields) -> Gemma3Config:
        hf.only("attn_logit_softcapping", None)
        hf.only("final_logit_softcapping", None)
        tables, usual = hf.table("rope_parameters"), hf.get("rope_local_base_freq", 10000.0)
        if other := sorted(tables.keys() - {FULL, SLIDING}):
            raise UserError(f"rope_parameters.{other[0]}: expected one table for each kind of layer", where=hf.where)
        full, local = (HfFields(tables, f"{hf.where}: rope_parameters").table(kind) for kind in (FULL, SLIDING))
        theta, scaling = rope_of(hf, {**hf.table("rope_scaling"), **full}, 1000000.0)
        local_theta, local_scaling = rope_of(hf, {"rope_theta": usual, **local})
        if local_scaling is not None:
            raise UserError(f"rope_parameters.{SLIDING}: scaling of the local RoPE is not supported", where=hf.where)
        inner = HfFields({**hf.values, "rope_parameters": None, "rope_scaling": None}, hf.where)
        fields = cls._fields(inner, 6)
        hf.ignore(*inner.read)
        return cls(
            family="gemma3", local_rope_theta=local_theta,
            **{**fields, "rope_theta": theta, "rope_scaling": scaling},
        )  # fmt: skip

    @classmethod
    def from_gguf(cls, name: str, fields: dict[str, Any], setting: Callable[..., Any]) -> Gemma3Config:
        local = float(setting("rope.freq_base_swa", 10000.0))
        own = cls._from_gguf(fields, setting("attention.sliding_window"))
        return cls(family="gemma3", local_rope_theta=local, **own)

    def to_gguf(self) -> tuple[str, dict[str, int | float | str]]:
        name, settings = super().to_gguf()
        return name, settings | {"rope.freq_base_swa": float(self.local_rope_theta)}

    def to_hf(self, metadata: dict[str, Any]) -> dict[str, Any]:
        # In the spelling of transformers 4, which 5 reads too.
        hf = self._to_hf(metadata) | {"rope_local_base_freq": self.local_rope_theta}
        return {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", **hf}
