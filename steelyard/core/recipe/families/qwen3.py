"""Qwen3: Llama with an RMSNorm on every head of queries and keys."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, Literal

from pydantic import PositiveFloat

from steelyard.core.recipe.blocks import AttentionBlock, NormBlock
from steelyard.core.recipe.hf_fields import HfFields
from steelyard.core.recipe.hf_rotary import rotary_config, rotary_fields, window_of
from steelyard.core.recipe.model_section import Heads, RotaryConfig
from steelyard.core.recipe.rope_scaling import Rows


class Qwen3Attention(RotaryConfig):
    """Keys and attention of Qwen3, with an MLP or with experts (`moe.py`)."""

    head_dim: Heads = 128
    qkv_bias: bool = False
    window: Rows | None = None
    rope_theta: PositiveFloat = 1000000.0
    norm_eps: PositiveFloat = 1e-6

    def attention(self, number: int) -> AttentionBlock:
        return replace(
            super().attention(number), norm=NormBlock(self.head_dim, self.norm_eps), window=self.window,
            qkv_bias=self.qkv_bias, output_bias=self.qkv_bias,
        )  # fmt: skip

    @classmethod
    def attention_fields(cls, hf: HfFields) -> dict[str, Any]:
        """Keys of a config.json that every Qwen3 has."""
        return {"qkv_bias": hf.get("attention_bias", False), "window": window_of(hf, uses=False)}

    def attention_config(self, metadata: dict[str, Any]) -> dict[str, Any]:
        """The part of config.json that every Qwen3 has."""
        window = {} if self.window is None else {"sliding_window": self.window, "max_window_layers": 0}
        return {
            **rotary_config(self, metadata), "attention_bias": self.qkv_bias,
            "use_sliding_window": self.window is not None, **window,
        }  # fmt: skip


class Qwen3Config(Qwen3Attention):
    """Qwen3: Llama with an RMSNorm on every head of queries and keys."""

    architectures: ClassVar[tuple[str, ...]] = ("Qwen3ForCausalLM",)
    model_types: ClassVar[tuple[str, ...]] = ("qwen3",)
    gguf_architectures: ClassVar[tuple[str, ...]] = ("qwen3",)

    family: Literal["qwen3"]

    @classmethod
    def from_hf(cls, hf: HfFields) -> Qwen3Config:
        return cls(family="qwen3", **cls.attention_fields(hf), **rotary_fields(hf, head_dim=128))

    @classmethod
    def from_gguf(cls, name: str, fields: dict[str, Any], setting: Callable[..., Any]) -> Qwen3Config:
        return cls(family="qwen3", **fields)

    def to_gguf(self) -> tuple[str, dict[str, int | float | str]]:
        if self.qkv_bias:
            raise ValueError("model.qkv_bias = true in the family qwen3")
        return "qwen3", {}

    def to_hf(self, metadata: dict[str, Any]) -> dict[str, Any]:
        return {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", **self.attention_config(metadata)}
