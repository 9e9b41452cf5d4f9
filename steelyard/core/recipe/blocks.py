"""What a model consists of, as data: a list of layers, each an attention, an MLP and norms. Layers may differ.

Every block declares its parameters and how tensor parallelism shards them. Parallelism, checkpoints, sizes, plans,
sparsity and fine-tuning read these declarations and never ask for the family of a model. `model/transformer.py` builds
a module from each block.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from steelyard.core.recipe.rope_scaling import RopeScaling

ATTENTION_NORM, ATTENTION_POST_NORM, MLP_NORM, MLP_POST_NORM = NORM_PLACES = (
    "attention_norm", "attention_post_norm", "mlp_norm", "mlp_post_norm",
)  # fmt: skip
PRE_NORM = (ATTENTION_NORM, MLP_NORM)
POST_NORM = (ATTENTION_POST_NORM, MLP_POST_NORM)


@dataclass(frozen=True)
class BlockParam:
    """The shape of a parameter, and the dimension that tensor parallelism shards; None if every rank holds it."""

    shape: tuple[int, ...]
    shard_dim: int | None = None
    is_partial: bool = False
    """Whether a rank computes only a part of the gradient of a parameter that it holds in full."""
    is_expert: bool = False
    """Whether the first dimension counts experts, which expert parallelism shards."""
    is_matrix: bool = False
    """Whether it is the weight matrix of a linear map, or a stack of them, one for each expert."""

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Rope:
    """Rotary positions: the first `width` dimensions of each head are rotated."""

    theta: float
    width: int
    scaling: RopeScaling | None = None


@dataclass(frozen=True)
class NormBlock:
    """RMSNorm or LayerNorm. With `is_offset` the scale is 1 + parameter, as in Gemma."""

    width: int
    eps: float
    kind: Literal["rms", "layer"] = "rms"
    is_offset: bool = False

    def params(self, shard_dim: int | None = None, is_partial: bool = False) -> dict[str, BlockParam]:
        """The parameters by name."""
        names = ("weight", "bias") if self.kind == "layer" else ("offset",) if self.is_offset else ("weight",)
        return {name: BlockParam((self.width,), shard_dim, is_partial) for name in names}


@dataclass(frozen=True)
class AttentionBlock:
    """Causal attention. Groups of query heads share a key-value head."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    output_bias: bool = False
    rope: Rope | None = None
    norm: NormBlock | None = None
    """Applied to queries and keys: to each head if its width is `head_dim`, otherwise to all heads together."""
    window: int | None = None
    """A token attends to this many tokens: itself and those before it; None for all."""
    softcap: float | None = None
    """Scores are softcap * tanh(score / softcap)."""
    scale: float | None = None
    """The factor of the scores; by default 1 / sqrt(head_dim)."""

    @property
    def query_width(self) -> int:
        """The width of the queries of all heads."""
        return self.heads * self.head_dim

    @property
    def key_width(self) -> int:
        """The width of all keys, and of all values."""
        return self.kv_heads * self.head_dim

    @property
    def norms_heads(self) -> bool:
        """Whether each head is normalized alone."""
        return self.norm is not None and self.norm.width == self.head_dim

    def norms(self) -> dict[str, NormBlock]:
        """The norms of queries and keys."""
        if self.norm is None:
            return {}
        widths = (self.head_dim,) * 2 if self.norms_heads else (self.query_width, self.key_width)
        names = ("query_norm", "key_norm")
        return {
            name: NormBlock(width, self.norm.eps, self.norm.kind, self.norm.is_offset)
            for name, width in zip(names, widths, strict=True)
        }

    def matrices(self) -> dict[str, tuple[int, int]]:
        """Rows (outputs) and columns (inputs) of the weight matrices."""
        query, key = (self.query_width, self.hidden), (self.key_width, self.hidden)
        return {"query": query, "key": key, "value": key, "output": (self.hidden, self.query_width)}

    def params(self) -> dict[str, BlockParam]:
        """The parameters by name."""
        found = {}
        for name, (rows, columns) in self.matrices().items():
            is_output = name == "output"
            found[f"{name}.weight"] = BlockParam((rows, columns), 1 if is_output else 0, is_matrix=True)
            if self.output_bias if is_output else self.qkv_bias:
                found[f"{name}.bias"] = BlockParam((rows,), None if is_output else 0)
        for name, norm in self.norms().items():
            # All ranks hold the norm of a head, but each computes its gradient for its own heads.
            shard_dim, is_partial = (None, True) if self.norms_heads else (0, False)
            found |= {f"{name}.{key}": param for key, param in norm.params(shard_dim, is_partial).items()}
        return found

    def score_flops(self, sequence_length: int) -> int:
        """FLOPs to train on one token, without those of the matrices: two products per key, three times."""
        keys = sequence_length / 2
        if self.window is not None and self.window < sequence_length:
            keys = self.window - self.window**2 / (2 * sequence_length)
        return int(12 * self.query_width * keys)


@dataclass(frozen=True)
class MlpBlock:
    """down(activation(up(x))), or if gated down(activation(gate(x)) * up(x))."""

    hidden: int
    ffn: int
    activation: Literal["silu", "gelu"]
    gated: bool = True
    bias: bool = False

    def matrices(self) -> dict[str, tuple[int, int]]:
        """Rows (outputs) and columns (inputs) of the weight matrices."""
        wide = (self.ffn, self.hidden)
        return ({"gate": wide} if self.gated else {}) | {"up": wide, "down": (self.hidden, self.ffn)}

    def params(self) -> dict[str, BlockParam]:
        """The parameters by name."""
        found = {}
        for name, (rows, columns) in self.matrices().items():
            found[f"{name}.weight"] = BlockParam((rows, columns), 1 if name == "down" else 0, is_matrix=True)
            if self.bias:
                found[f"{name}.bias"] = BlockParam((rows,), None if name == "down" else 0)
        return found

    def active_size(self) -> int:
        """The parameters that compute one token."""
        return sum(param.size for param in self.params().values())


@dataclass(frozen=True)
class Routing:
    """How a router chooses the experts of a token, and the losses that balance it."""

    experts: int
    top_k: int
    score: Literal["softmax", "sigmoid"] = "softmax"
    normalizes: bool = True
    """Whether the weights of the chosen experts sum to `scale`."""
    scale: float = 1.0
    bias_rate: float | None = None
    """If set, a bias is added to the scores for the choice alone, and every step moves it by this much against the
    load of its expert."""
    aux_loss: float = 0.0
    z_loss: float = 0.0
    capacity: float | None = None
    """Tokens that an expert takes from a sequence, relative to an even load; None takes all."""


@dataclass(frozen=True)
class ExpertsBlock:
    """A mixture of experts: a router sends each token to `top_k` gated MLPs. All tokens pass the shared expert too."""

    hidden: int
    ffn: int
    activation: Literal["silu", "gelu"]
    routing: Routing
    shared_ffn: int | None = None

    gated, bias = True, False

    @property
    def expert(self) -> MlpBlock:
        """One expert."""
        return MlpBlock(self.hidden, self.ffn, self.activation)

    @property
    def shared(self) -> MlpBlock | None:
        """The expert of all tokens."""
        return None if self.shared_ffn is None else MlpBlock(self.hidden, self.shared_ffn, self.activation)

    def matrices(self) -> dict[str, tuple[int, int]]:
        """Rows (outputs) and columns (inputs) of the weight matrices of one expert, and of the shared one."""
        found = {f"experts.{name}": size for name, size in self.expert.matrices().items()}
        shared = {} if self.shared is None else self.shared.matrices()
        return found | {f"shared.{name}": size for name, size in shared.items()}

    def params(self) -> dict[str, BlockParam]:
        """The parameters by name."""
        experts = self.routing.experts
        # A tensor rank computes the router's gradient for its part of the experts' width.
        found = {"router.weight": BlockParam((experts, self.hidden), is_partial=True)}
        if self.routing.bias_rate is not None:
            found["router.balance"] = BlockParam((experts,))
        for name, param in self.expert.params().items():
            assert param.shard_dim is not None
            shape, shard_dim = (experts, *param.shape), param.shard_dim + 1
            found[f"experts.{name}"] = replace(param, shape=shape, shard_dim=shard_dim, is_expert=True)
        if self.shared is not None:
            found |= {f"shared.{name}": param for name, param in self.shared.params().items()}
        return found

    def active_size(self) -> int:
        """The parameters that compute one token."""
        params = self.params().values()
        experts = sum(param.size for param in params if param.is_expert)
        others = sum(param.size for param in params if not param.is_expert)
        return others + experts * self.routing.top_k // self.routing.experts


@dataclass(frozen=True)
class LayerBlock:
    """A transformer layer: attention and MLP, with norms before them, after them, or both."""

    attention: AttentionBlock
    mlp: MlpBlock | ExpertsBlock
    norm: NormBlock
    norm_places: tuple[str, ...] = PRE_NORM

    def matrices(self) -> dict[str, tuple[int, int]]:
        """Rows (outputs) and columns (inputs) of the weight matrices."""
        return self.attention.matrices() | self.mlp.matrices()

    def params(self) -> dict[str, BlockParam]:
        """The parameters by name, such as `attention.query.weight`."""
        found: dict[str, BlockParam] = {}
        for place, block in (("attention", self.attention.params()), ("mlp", self.mlp.params())):
            found |= {f"{place}.{name}": param for name, param in block.items()}
        for place in self.norm_places:
            found |= {f"{place}.{name}": param for name, param in self.norm.params().items()}
        return found

    def active_size(self) -> int:
        """The parameters that compute one token."""
        others = sum(param.size for name, param in self.params().items() if not name.startswith("mlp."))
        return others + self.mlp.active_size()

    def flops(self, sequence_length: int) -> int:
        """FLOPs to train on one token: 6 per active parameter, and attention scores."""
        return 6 * self.active_size() + self.attention.score_flops(sequence_length)


@dataclass(frozen=True)
class ModelBlocks:
    """A whole model: embedding, layers, final norm and head."""

    layers: tuple[LayerBlock, ...]
    norm: NormBlock
    positions: int | None = None
    """Rows of a learned position table."""
    embed_scale: float | None = None
    logit_softcap: float | None = None

    @cached_property
    def has_experts(self) -> bool:
        """Whether a layer is a mixture of experts."""
        return any(isinstance(layer.mlp, ExpertsBlock) for layer in self.layers)

    def ropes(self) -> set[Rope]:
        """The different rotary positions."""
        return {layer.attention.rope for layer in self.layers if layer.attention.rope is not None}

    def layer_params(self) -> Iterator[tuple[int, str, BlockParam]]:
        """The parameters of all layers: layer number, name within the layer, and the parameter."""
        for number, layer in enumerate(self.layers):
            for name, param in layer.params().items():
                yield number, name, param
