"""OLMo 2: norms after attention and MLP instead of before, and an RMSNorm over all queries and over all keys."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, Literal

from pydantic import PositiveFloat

from steelyard.core.recipe.blocks import POST_NORM, AttentionBlock, NormBlock
from steelyard.core.recipe.hf_fields import SANDWICH_MODULES, HfFields, HfKeys
from steelyard.core.recipe.hf_rotary import rotary_config, rotary_fields
from steelyard.core.recipe.model_section import RotaryConfig


class Olmo2Config(RotaryConfig):
    """OLMo 2: norms after attention and MLP, and norms of all queries and of all keys."""

    architectures: ClassVar[tuple[str, ...]] = ("Olmo2ForCausalLM",)
    model_types: ClassVar[tuple[str, ...]] = ("olmo2",)
    hf_keys: ClassVar[HfKeys] = HfKeys(SANDWICH_MODULES)
    norm_places: ClassVar[tuple[str, ...]] = POST_NORM

    family: Literal["olmo2"]
    rope_theta: PositiveFloat = 500000.0
    norm_eps: PositiveFloat = 1e-6

    def attention(self, number: int) -> AttentionBlock:
        attention = super().attention(number)
        return replace(attention, norm=NormBlock(attention.query_width, self.norm_eps))

    @classmethod
    def from_hf(cls, hf: HfFields) -> Olmo2Config:
        hf.only("attention_bias", False)
        return cls(family="olmo2", **rotary_fields(hf, eps=1e-5))

    def to_hf(self, metadata: dict[str, Any]) -> dict[str, Any]:
        named = {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2", "attention_bias": False}
        return named | rotary_config(self, metadata)
