"""GPT-2 and GPT-3: learned positions, LayerNorm, GELU, biases."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, PositiveFloat, model_validator

from steelyard.core.recipe.blocks import AttentionBlock, LayerBlock, MlpBlock, NormBlock
from steelyard.core.recipe.hf_fields import HfFields, HfKeys
from steelyard.core.recipe.model_section import InnerWidth, ModelConfig, uneven
from steelyard.core.recipe.rope_scaling import Rows

TANH_GELU = ("gelu_new", "gelu_pytorch_tanh")


class GptConfig(ModelConfig):
    """GPT-2 and GPT-3: learned positions, LayerNorm, GELU, biases."""

    architectures: ClassVar[tuple[str, ...]] = ("GPT2LMHeadModel",)
    model_types: ClassVar[tuple[str, ...]] = ("gpt2",)
    hf_keys: ClassVar[HfKeys] = HfKeys(
        embed="transformer.wte", positions="transformer.wpe", norm="transformer.ln_f", layer="transformer.h.{}.",
        modules={
            "attention_norm": "ln_1", "attention.query+key+value": "attn.c_attn", "attention.output": "attn.c_proj",
            "mlp_norm": "ln_2", "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj",
        },
        transposed=True,
    )  # fmt: skip

    family: Literal["gpt"]
    ffn: InnerWidth = Field(default_factory=lambda data: 4 * data["hidden"])
    positions: Rows = Field(1024, description="rows of the learned position table")
    tied: bool = True
    norm_eps: PositiveFloat = 1e-5

    @model_validator(mode="after")
    def _divides(self) -> GptConfig:
        if self.hidden % self.heads:
            raise uneven("model.heads", f"{self.heads} heads", "model.hidden", self.hidden)
        return self

    def layer(self, number: int) -> LayerBlock:
        attention = AttentionBlock(
            self.hidden, self.heads, self.heads, self.hidden // self.heads, qkv_bias=True, output_bias=True
        )
        return LayerBlock(attention, MlpBlock(self.hidden, self.ffn, "gelu", gated=False, bias=True), self.norm())

    def norm(self) -> NormBlock:
        return NormBlock(self.hidden, self.norm_eps, "layer")

    def ends(self) -> dict[str, Any]:
        return {"positions": self.positions}

    @classmethod
    def from_hf(cls, hf: HfFields) -> GptConfig:
        hf.only("activation_function", *TANH_GELU)
        hf.only("scale_attn_weights", True)
        hf.only("scale_attn_by_inverse_layer_idx", False)
        hf.only("add_cross_attention", False)
        hf.ignore("n_ctx", "n_special", "predict_special_tokens", "output_past", "reorder_and_upcast_attn",
                  "summary_activation", "summary_first_dropout",
                  "summary_proj_to_labels", "summary_type", "summary_use_proj")  # fmt: skip
        hidden = hf.get("n_embd")
        return cls(
            family="gpt",
            layers=hf.get("n_layer"),
            hidden=hidden,
            heads=hf.get("n_head"),
            ffn=hf.get("n_inner", None) or 4 * hidden,
            positions=hf.get("n_positions"),
            vocab=hf.get("vocab_size"),
            tied=hf.get("tie_word_embeddings", True),
            norm_eps=float(hf.get("layer_norm_epsilon", 1e-5)),
            init_std=float(hf.get("initializer_range", 0.02)),
        )

    def to_hf(self, metadata: dict[str, Any]) -> dict[str, Any]:
        dropout = {key: value for key, value in (metadata.get("dropout") or {}).items() if key != "attention_dropout"}
        return {
            "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": self.hidden, "n_layer": self.layers,
            "n_head": self.heads, "n_inner": self.ffn, "n_positions": self.positions, "n_ctx": self.positions,
            "activation_function": "gelu_new", "layer_norm_epsilon": self.norm_eps,
            "attn_pdrop": self.attention_dropout, "embd_pdrop": self.dropout, "resid_pdrop": self.dropout,
        } | dropout  # fmt: skip
