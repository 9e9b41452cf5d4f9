"""`[model]`: the sizes of the model. Each family has its own keys (`families/`); presets are recipes, not code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from steelyard.core.recipe.blocks import PRE_NORM, AttentionBlock, LayerBlock, MlpBlock, ModelBlocks, NormBlock, Rope
from steelyard.core.recipe.hf_fields import LLAMA_MODULES, HfFields, HfKeys
from steelyard.core.recipe.rope_scaling import RopeScaling, Rows
from steelyard.core.recipe.section import Section, contradiction

Share = Annotated[float, Field(ge=0, lt=1)]
# No model is larger. The product of any two sizes fits in 64 bits, and this many layers are built in a few seconds.
Layers = Annotated[int, Field(gt=0, le=4_000)]
Heads = Annotated[int, Field(gt=0, le=10**5)]
Width = Annotated[int, Field(gt=0, le=10**6)]
InnerWidth = Annotated[int, Field(gt=0, le=10**7)]


class ModelConfig(Section):
    """Keys of every family."""

    architectures: ClassVar[tuple[str, ...]] = ()
    """Classes of `transformers`."""
    model_types: ClassVar[tuple[str, ...]] = ()
    """The `model_type` of each."""
    hf_keys: ClassVar[HfKeys] = HfKeys(LLAMA_MODULES)
    gguf_architectures: ClassVar[tuple[str, ...]] = ()
    """Architectures of llama.cpp."""

    family: str
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
    z_loss: NonNegativeFloat = Field(0.0, description="weight of the squared log sum of the head's logits")
    ffn: InnerWidth
    tied: bool = False
    norm_eps: PositiveFloat = 1e-5

    @property
    def padded_vocab(self) -> int:
        """Rows of the embedding table."""
        return -(-self.vocab // self.vocab_multiple) * self.vocab_multiple

    @cached_property
    def blocks(self) -> ModelBlocks:
        """What the model consists of."""
        layers: dict[LayerBlock, LayerBlock] = {}  # Equal layers are one object.
        numbered = (self.layer(number) for number in range(self.layers))
        return ModelBlocks(tuple(layers.setdefault(layer, layer) for layer in numbered), self.norm(), **self.ends())

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        copied = super().model_copy(update=update, deep=deep)
        copied.__dict__.pop("blocks", None)  # Pydantic copies cached properties too.
        return copied

    def layer(self, number: int) -> LayerBlock:
        """One layer."""
        raise NotImplementedError

    @classmethod
    def from_hf(cls, hf: HfFields) -> ModelConfig:
        """The config of a config.json; `hf` checks afterwards that no setting was ignored."""
        raise NotImplementedError

    def to_hf(self, metadata: dict[str, Any]) -> dict[str, Any]:
        """The config.json, except for keys of every family. `metadata` has what the config does not: `hf_config.py`."""
        raise NotImplementedError

    @classmethod
    def from_gguf(cls, name: str, fields: dict[str, Any], setting: Callable[..., Any]) -> ModelConfig:
        """The config of an architecture of llama.cpp, from the keys of every family and its own settings."""
        raise NotImplementedError

    def to_gguf(self) -> tuple[str, dict[str, int | float | str]]:
        """The architecture and its own settings. Raises a ValueError with what has no counterpart there."""
        raise ValueError(f"the family {self.family}")

    @classmethod
    def architecture_of(cls, hf: Mapping[str, Any]) -> str | None:
        """The class of `transformers` that a config.json names, directly or by its `model_type`."""
        named = hf.get("architectures")
        if isinstance(named, list) and named:
            return str(named[0])
        by_type = dict(zip(cls.model_types, cls.architectures, strict=True))
        return by_type.get(str(hf.get("model_type")))

    def norm(self) -> NormBlock:
        """The norms of the residual stream."""
        return NormBlock(self.hidden, self.norm_eps)

    def ends(self) -> dict[str, Any]:
        """Settings of `ModelBlocks` outside the layers."""
        return {}


class RotaryConfig(ModelConfig):
    """Keys of families with RMSNorm, gated MLP, RoPE and grouped-query attention."""

    activation: ClassVar[Any] = "silu"
    norm_places: ClassVar[tuple[str, ...]] = PRE_NORM

    ffn: InnerWidth = Field(default_factory=lambda data: swiglu_width(data["hidden"]))
    kv_heads: Heads = Field(default_factory=lambda data: data["heads"])
    head_dim: Heads = Field(default_factory=lambda data: max(1, data["hidden"] // data["heads"]))
    rope_theta: PositiveFloat = 10000.0
    rope_scaling: RopeScaling | None = None
    rope_share: Annotated[float, Field(gt=0, le=1)] = Field(
        1.0, description="share of the dimensions of a head that RoPE rotates, from the first"
    )

    @model_validator(mode="before")
    @classmethod
    def _head_dim_is_given_or_follows(cls, data: Any) -> Any:
        if isinstance(data, dict) and "head_dim" not in data:
            hidden, heads = data.get("hidden"), data.get("heads")
            if isinstance(hidden, int) and isinstance(heads, int) and heads > 0 and hidden % heads:
                raise uneven("model.heads", f"{heads} heads", "model.hidden", hidden)
        return data

    @model_validator(mode="after")
    def _divides(self) -> RotaryConfig:
        if self.heads % self.kv_heads:
            raise uneven("model.kv_heads", f"{self.kv_heads} key-value heads", "model.heads", self.heads)
        for rope in self.blocks.ropes():
            if rope.scaling is not None and rope.scaling.kind == "yarn" and rope.theta <= 1:
                raise contradiction("model.rope_theta", "must be above 1 for YaRN", "the usual value is 10000.0")
            if rope.width % 2 or not rope.width:
                raise contradiction(
                    "model.head_dim",
                    f"RoPE rotates pairs of dimensions, but its width is {rope.width}",
                    "choose model.hidden and model.heads, or model.rope_share, so that it is even and above 0",
                )
        return self

    def layer(self, number: int) -> LayerBlock:
        mlp = MlpBlock(self.hidden, self.ffn, self.activation)
        return LayerBlock(self.attention(number), mlp, self.norm(), self.norm_places)

    def attention(self, number: int) -> AttentionBlock:
        """The attention of one layer."""
        return AttentionBlock(self.hidden, self.heads, self.kv_heads, self.head_dim, rope=self.rope())

    def rope(self) -> Rope:
        """Rotary positions of a layer."""
        return Rope(self.rope_theta, int(self.head_dim * self.rope_share), self.rope_scaling)


def swiglu_width(hidden: int) -> int:
    """Two thirds of 4 x hidden, rounded up to a multiple of 256, as in Llama."""
    return -(-8 * hidden // 3 // 256) * 256


def uneven(key: str, part: str, whole_key: str, whole: int) -> Exception:
    """The error for heads that do not divide a size."""
    return contradiction(key, f"{part} do not divide {whole_key} = {whole}", f"choose a divisor of {whole}")
