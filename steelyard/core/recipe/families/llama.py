"""Llama 1 to 3, Mistral and Qwen2: RMSNorm, SwiGLU, RoPE, grouped-query attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, Literal

from steelyard.core.recipe.blocks import AttentionBlock
from steelyard.core.recipe.hf_fields import HfFields
from steelyard.core.recipe.hf_rotary import rotary_config, rotary_fields, window_of
from steelyard.core.recipe.model_section import RotaryConfig
from steelyard.core.recipe.rope_scaling import Rows

MISTRAL, QWEN2 = "MistralForCausalLM", "Qwen2ForCausalLM"


class LlamaConfig(RotaryConfig):
    """Llama and similar models: RMSNorm, SwiGLU, RoPE, grouped-query attention."""

    architectures: ClassVar[tuple[str, ...]] = ("LlamaForCausalLM", MISTRAL, QWEN2)
    model_types: ClassVar[tuple[str, ...]] = ("llama", "mistral", "qwen2")
    gguf_architectures: ClassVar[tuple[str, ...]] = ("llama", "qwen2")

    family: Literal["llama"]
    qkv_bias: bool = False
    window: Rows | None = None

    def attention(self, number: int) -> AttentionBlock:
        return replace(super().attention(number), qkv_bias=self.qkv_bias, window=self.window)

    @classmethod
    def from_hf(cls, hf: HfFields) -> LlamaConfig:
        name, window = cls.architecture_of(hf.values), None
        hf.only("mlp_bias", False)
        hf.only("use_mrope", False)
        if name == QWEN2:  # It has these biases whatever `attention_bias` says.
            hf.ignore("attention_bias")
            window = window_of(hf, uses=False)
        else:
            hf.only("attention_bias", False)
        if name == MISTRAL:
            window = window_of(hf, default=4096)
        hf.ignore("sliding_window")  # Llama has no windows, whatever its file says.
        return cls(family="llama", qkv_bias=name == QWEN2, window=window, **rotary_fields(hf))

    @classmethod
    def from_gguf(cls, name: str, fields: dict[str, Any], setting: Callable[..., Any]) -> LlamaConfig:
        return cls(family="llama", qkv_bias=name == "qwen2", **fields)

    def to_gguf(self) -> tuple[str, dict[str, int | float | str]]:
        return ("qwen2" if self.qkv_bias else "llama"), {}

    def to_hf(self, metadata: dict[str, Any]) -> dict[str, Any]:
        hf = rotary_config(self, metadata)
        if self.qkv_bias:
            window: dict[str, Any] = {"use_sliding_window": self.window is not None}
            if self.window is not None:
                window |= {"sliding_window": self.window, "max_window_layers": 0}
            return {"architectures": [QWEN2], "model_type": "qwen2", **hf, **window}
        if self.window is not None or metadata.get("architecture") == MISTRAL:
            return {"architectures": [MISTRAL], "model_type": "mistral", **hf, "sliding_window": self.window}
        return {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", **hf, "attention_bias": False,
            "mlp_bias": False,
        }  # fmt: skip
