"""`[model]`: the sizes of the model. Each family has its own keys; presets are recipes, not code."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, model_validator

from steelyard.core.recipe.section import Section, contradiction

Share = Annotated[float, Field(ge=0, lt=1)]
# No model is larger. The product of any two sizes fits in 64 bits, and this many layers are built in a few seconds.
Stretch = Annotated[float, Field(gt=0, le=10**6)]
Layers = Annotated[int, Field(gt=0, le=4_000)]
Heads = Annotated[int, Field(gt=0, le=10**5)]
Width = Annotated[int, Field(gt=0, le=10**6)]
InnerWidth = Annotated[int, Field(gt=0, le=10**7)]
Rows = Annotated[int, Field(gt=0, le=10**8)]


class ModelConfig(Section):
    """Keys of every family."""

    layers: Layers
    hidden: Width
    heads: Heads
    vocab: Rows = Field(description="number of token ids")
    vocab_multiple: Width = Field(
        128, description="the embedding is padded to a multiple of this; padding is never predicted or exported"
    )
    init_std: PositiveFloat = 0.02
    dropout: Share = Field(0.0, description="dropout of the embedding's and of each residual branch's outputs")
    attention_dropout: Share = Field(0.0, description="dropout of attention weights")

    @property
    def padded_vocab(self) -> int:
        """Rows of the embedding table."""
        return -(-self.vocab // self.vocab_multiple) * self.vocab_multiple


class GptConfig(ModelConfig):
    """GPT-2 and GPT-3: learned positions, LayerNorm, GELU, biases."""

    family: Literal["gpt"]
    ffn: InnerWidth = Field(default_factory=lambda data: 4 * data["hidden"])
    positions: Rows = Field(1024, description="rows of the learned position table")
    tied: bool = True
    norm_eps: PositiveFloat = 1e-5

    @model_validator(mode="after")
    def _divides(self) -> GptConfig:
        if self.hidden % self.heads:
            raise _uneven("model.heads", f"{self.heads} heads", "model.hidden", self.hidden)
        return self


class RopeScaling(Section):
    """Llama 3's scaling of the RoPE frequencies for contexts longer than the original."""

    factor: Stretch = 8.0
    low_freq_factor: Stretch = 1.0
    high_freq_factor: Stretch = 4.0
    original_positions: Rows = 8192


class LlamaConfig(ModelConfig):
    """Llama and similar models: RMSNorm, SwiGLU, RoPE, grouped-query attention."""

    family: Literal["llama"]
    ffn: InnerWidth = Field(default_factory=lambda data: _swiglu_width(data["hidden"]))
    kv_heads: Heads = Field(default_factory=lambda data: data["heads"])
    head_dim: Heads = Field(default_factory=lambda data: max(1, data["hidden"] // data["heads"]))
    rope_theta: PositiveFloat = 10000.0
    rope_scaling: RopeScaling | None = None
    qkv_bias: bool = False
    tied: bool = False
    norm_eps: PositiveFloat = 1e-5

    @model_validator(mode="before")
    @classmethod
    def _head_dim_is_given_or_follows(cls, data: Any) -> Any:
        if isinstance(data, dict) and "head_dim" not in data:
            hidden, heads = data.get("hidden"), data.get("heads")
            if isinstance(hidden, int) and isinstance(heads, int) and heads > 0 and hidden % heads:
                raise _uneven("model.heads", f"{heads} heads", "model.hidden", hidden)
        return data

    @model_validator(mode="after")
    def _divides(self) -> LlamaConfig:
        if self.heads % self.kv_heads:
            raise _uneven("model.kv_heads", f"{self.kv_heads} key-value heads", "model.heads", self.heads)
        if self.head_dim % 2:
            raise contradiction(
                "model.head_dim",
                f"{self.head_dim} is odd, but RoPE rotates pairs of dimensions",
                "choose model.hidden and model.heads so that the head dimension is even",
            )
        return self


Model = Annotated[GptConfig | LlamaConfig, Field(discriminator="family")]


def _swiglu_width(hidden: int) -> int:
    """Two thirds of 4 x hidden, rounded up to a multiple of 256, as in Llama."""
    return -(-8 * hidden // 3 // 256) * 256


def _uneven(key: str, part: str, whole_key: str, whole: int) -> Exception:
    return contradiction(key, f"{part} do not divide {whole_key} = {whole}", f"choose a divisor of {whole}")
