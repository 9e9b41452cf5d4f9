"""SmolLM3: Llama in which every fourth layer has no rotary positions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, Literal

from pydantic import Field, PositiveFloat

from steelyard.core.errors import UserError
from steelyard.core.recipe.blocks import AttentionBlock
from steelyard.core.recipe.hf_fields import HfFields
from steelyard.core.recipe.hf_rotary import rotary_config, rotary_fields, window_of
from steelyard.core.recipe.model_section import Layers, RotaryConfig


class SmolLm3Config(RotaryConfig):
    """SmolLM3: Llama in which every fourth layer has no rotary positions."""

    architectures: ClassVar[tuple[str, ...]] = ("SmolLM3ForCausalLM",)
    model_types: ClassVar[tuple[str, ...]] = ("smollm3",)

    family: Literal["smollm3"]
    no_rope_every: Layers = Field(4, description="layers N, 2N, ... counted from 1 have no rotary positions")
    tied: bool = True
    rope_theta: PositiveFloat = 2000000.0
    norm_eps: PositiveFloat = 1e-6

    def attention(self, number: int) -> AttentionBlock:
        attention = super().attention(number)
        return attention if (number + 1) % self.no_rope_every else replace(attention, rope=None)

    @classmethod
    def from_hf(cls, hf: HfFields) -> SmolLm3Config:
        hf.only("mlp_bias", False)
        hf.only("attention_bias", False)
        if window_of(hf, uses=False) is not None:
            raise UserError("use_sliding_window is True, but only False is supported", where=hf.where)
        every, flags = hf.get("no_rope_layer_interval", 4), hf.get("no_rope_layers", None)
        fields = rotary_fields(hf, tied=True, theta=2000000.0)
        if flags:  # 1 in a layer with rotary positions
            every = flags.index(0) + 1 if 0 in flags else len(flags) + 1
            if flags != [int(bool((number + 1) % every)) for number in range(fields["layers"])]:
                raise UserError("no_rope_layers: layers without RoPE must be every N-th", where=hf.where)
        return cls(family="smollm3", no_rope_every=every, **fields)

    def to_hf(self, metadata: dict[str, Any]) -> dict[str, Any]:
        flags = [int(layer.attention.rope is not None) for layer in self.blocks.layers]
        return {
            "architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", **rotary_config(self, metadata),
            "no_rope_layer_interval": self.no_rope_every, "no_rope_layers": flags, "attention_bias": False,
            "mlp_bias": False, "use_sliding_window": False,
        }  # fmt: skip
