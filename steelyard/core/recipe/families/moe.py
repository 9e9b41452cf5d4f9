"""Mixtures of experts: Mixtral and Qwen3-MoE. The keys of `MoeConfig` are those of every such family."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, model_validator

from steelyard.core.errors import UserError
from steelyard.core.recipe.blocks import AttentionBlock, ExpertsBlock, LayerBlock, Routing
from steelyard.core.recipe.families.qwen3 import Qwen3Attention
from steelyard.core.recipe.hf_fields import LLAMA_MODULES, HfFields, HfKeys
from steelyard.core.recipe.hf_rotary import rotary_config, rotary_fields, window_of
from steelyard.core.recipe.model_section import InnerWidth, RotaryConfig
from steelyard.core.recipe.rope_scaling import Rows
from steelyard.core.recipe.section import contradiction

Experts = Annotated[int, Field(gt=0, le=10**5)]
EXPERT_MODULES = LLAMA_MODULES | {
    "mlp.router": "mlp.gate",
    "mlp.experts.gate": "mlp.experts.{}.gate_proj",
    "mlp.experts.up": "mlp.experts.{}.up_proj",
    "mlp.experts.down": "mlp.experts.{}.down_proj",
}


class MoeConfig(RotaryConfig):
    """Keys of families with experts in place of an MLP."""

    experts: Experts
    experts_per_token: Experts = 2
    expert_ffn: InnerWidth = Field(default_factory=lambda data: data["ffn"], description="the width of an expert")
    shared_ffn: InnerWidth | None = Field(None, description="the width of an expert that computes all tokens")
    dense_layers: list[NonNegativeInt] = Field([], description="layers with an MLP in place of experts")
    router_score: Literal["softmax", "sigmoid"] = "softmax"
    router_normalize: bool = Field(True, description="scale the weights of the chosen experts to a sum of router_scale")
    router_scale: PositiveFloat = 1.0
    router_bias_rate: PositiveFloat | None = Field(
        None, description="balance experts by a bias of the choice; every step moves it by this much"
    )
    aux_loss: NonNegativeFloat = Field(0.001, description="weight of the load-balancing loss of each sequence")
    router_z_loss: NonNegativeFloat = Field(0.0, description="weight of the mean square of the router's log sum")
    capacity: PositiveFloat | None = Field(
        None, description="tokens per expert and sequence, relative to an even load; others are dropped"
    )

    @model_validator(mode="after")
    def _experts_are_enough(self) -> MoeConfig:
        if self.experts_per_token > self.experts:
            raise contradiction(
                "model.experts_per_token", f"{self.experts_per_token} exceeds model.experts = {self.experts}",
                f"choose {self.experts} at most",
            )  # fmt: skip
        if any(number >= self.layers for number in self.dense_layers):
            raise contradiction(
                "model.dense_layers", f"{self.dense_layers} has a number beyond the {self.layers} layers",
                "layers are counted from 0",
            )  # fmt: skip
        return self

    def layer(self, number: int) -> LayerBlock:
        dense = super().layer(number)
        if number in self.dense_layers:
            return dense
        routing = Routing(
            self.experts, self.experts_per_token, self.router_score, self.router_normalize, self.router_scale,
            self.router_bias_rate, self.aux_loss, self.router_z_loss, self.capacity,
        )  # fmt: skip
        experts = ExpertsBlock(self.hidden, self.expert_ffn, self.activation, routing, self.shared_ffn)
        return replace(dense, mlp=experts)

    def aux_loss_coef(self) -> float:
        """The coefficient in `transformers`: its load sums to `top_k`, and it takes the mean over layers."""
        layers = self.layers - len(set(self.dense_layers))
        return float(f"{self.aux_loss * max(layers, 1) / self.experts_per_token:.12g}")

    def refuse_for_hf(self, *also: str) -> None:
        """Raise for keys that the class of `transformers` does not have. Losses and capacity act in training only."""
        for key in ("shared_ffn", "router_score", "router_scale", "router_bias_rate", *also):
            if getattr(self, key) != type(self).model_fields[key].get_default(call_default_factory=False):
                raise UserError(
                    f"model.{key} = {getattr(self, key)} has no counterpart in {self.architectures[0]} of transformers",
                    hint="convert to steelyard, or train without this key",
                )


def _aux_loss(hf: HfFields, top_k: int, layers: int) -> float:
    """`aux_loss` of a config.json. The flag of `transformers` that turns it on belongs to a program, not to a model."""
    hf.ignore("output_router_logits")
    coefficient, chosen = hf.get("router_aux_loss_coef", 0.001), hf.get("num_experts_per_tok", top_k)
    return float(coefficient * chosen / max(layers, 1))


class MixtralConfig(MoeConfig):
    """Mixtral: Mistral with experts in every layer."""

    architectures: ClassVar[tuple[str, ...]] = ("MixtralForCausalLM",)
    model_types: ClassVar[tuple[str, ...]] = ("mixtral",)
    hf_keys: ClassVar[HfKeys] = HfKeys(
        LLAMA_MODULES
        | {
            "mlp.router": "block_sparse_moe.gate", "mlp.experts.gate": "block_sparse_moe.experts.{}.w1",
            "mlp.experts.up": "block_sparse_moe.experts.{}.w3", "mlp.experts.down": "block_sparse_moe.experts.{}.w2",
        }
    )  # fmt: skip

    family: Literal["mixtral"]
    window: Rows | None = None
    rope_theta: PositiveFloat = 1000000.0

    def attention(self, number: int) -> AttentionBlock:
        return replace(super().attention(number), window=self.window)

    @classmethod
    def from_hf(cls, hf: HfFields) -> MixtralConfig:
        hf.only("router_jitter_noise", 0.0)
        return cls(
            family="mixtral", window=window_of(hf), experts=hf.get("num_local_experts", 8),
            experts_per_token=hf.get("num_experts_per_tok", 2), aux_loss=_aux_loss(hf, 2, hf.get("num_hidden_layers")),
            **rotary_fields(hf, eps=1e-5, theta=1000000.0),
        )  # fmt: skip

    def to_hf(self, metadata: dict[str, Any]) -> dict[str, Any]:
        self.refuse_for_hf("router_normalize", "dense_layers")
        return {
            "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", **rotary_config(self, metadata),
            "intermediate_size": self.expert_ffn, "sliding_window": self.window, "num_local_experts": self.experts,
            "num_experts_per_tok": self.experts_per_token, "router_aux_loss_coef": self.aux_loss_coef(),
        }  # fmt: skip


class Qwen3MoeConfig(Qwen3Attention, MoeConfig):
    """Qwen3 with experts: many small ones, and a norm on every head of queries and keys."""

    architectures: ClassVar[tuple[str, ...]] = ("Qwen3MoeForCausalLM",)
    model_types: ClassVar[tuple[str, ...]] = ("qwen3_moe",)
    hf_keys: ClassVar[HfKeys] = HfKeys(EXPERT_MODULES)

    family: Literal["qwen3-moe"]
    experts_per_token: Experts = 8

    @classmethod
    def from_hf(cls, hf: HfFields) -> Qwen3MoeConfig:
        layers, every = hf.get("num_hidden_layers"), hf.get("decoder_sparse_step", 1)
        listed = hf.listed("mlp_only_layers") or []
        dense = [number for number in range(layers) if number in listed or (number + 1) % max(every, 1)]
        experts = hf.get("num_experts", None) or hf.get("num_local_experts", 128)
        return cls(
            family="qwen3-moe", experts=experts, experts_per_token=hf.get("num_experts_per_tok", 8),
            expert_ffn=hf.get("moe_intermediate_size", 768), router_normalize=hf.get("norm_topk_prob", False),
            aux_loss=_aux_loss(hf, 8, layers - len(dense)), dense_layers=dense, **cls.attention_fields(hf),
            **rotary_fields(hf),
        )  # fmt: skip

    def to_hf(self, metadata: dict[str, Any]) -> dict[str, Any]:
        self.refuse_for_hf()
        return {
            "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", **self.attention_config(metadata),
            "num_experts": self.experts, "num_experts_per_tok": self.experts_per_token,
            "moe_intermediate_size": self.expert_ffn, "norm_topk_prob": self.router_normalize,
            "router_aux_loss_coef": self.aux_loss_coef(), "mlp_only_layers": self.dense_layers,
            "decoder_sparse_step": 1,
        }  # fmt: skip
