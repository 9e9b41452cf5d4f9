"""Small models of every kind that formats must carry, held in memory as a source."""

from pathlib import Path

import torch

from steelyard import model
from steelyard.checkpoint.formats import CheckpointSource
from steelyard.checkpoint.formats.write import Target, convert
from steelyard.core.recipe.families.gpt import GptConfig
from steelyard.core.recipe.families.llama import LlamaConfig
from steelyard.core.recipe.families.moe import MixtralConfig, Qwen3MoeConfig
from steelyard.core.recipe.rope_scaling import RopeScaling

SIZES = {"vocab": 100, "layers": 4, "hidden": 32, "heads": 4}
GROUPED = {"family": "llama", "kv_heads": 2, "ffn": 48}
SHAPES = {
    "gpt": GptConfig(family="gpt", positions=64, **SIZES),
    "gpt-untied": GptConfig(family="gpt", positions=64, tied=False, **SIZES),
    "llama": LlamaConfig(family="llama", ffn=48, **SIZES),
    "llama-tied": LlamaConfig(**GROUPED, tied=True, **SIZES),
    "llama-3": LlamaConfig(**GROUPED, rope_theta=500000.0, rope_scaling=RopeScaling(), **SIZES),
    "llama-wide-heads": LlamaConfig(**GROUPED, head_dim=16, norm_eps=1e-6, **SIZES),
    "qwen2": LlamaConfig(**GROUPED, qkv_bias=True, **SIZES),
}
ROUTED = {"kv_heads": 2, "ffn": 48, "experts": 4, "experts_per_token": 2, **SIZES}
EXPERTS = {
    "mixtral": MixtralConfig(family="mixtral", **ROUTED),
    "qwen3-moe": Qwen3MoeConfig(
        family="qwen3-moe", head_dim=8, expert_ffn=24, router_normalize=False, aux_loss=0.0, **ROUTED
    ),
    "mixtral, dense layers": MixtralConfig(
        family="mixtral", expert_ffn=24, shared_ffn=16, dense_layers=[0, 2], router_score="sigmoid", router_scale=2.5,
        router_bias_rate=0.01, router_z_loss=0.001, **ROUTED,
    ),
}  # fmt: skip


class Held(CheckpointSource):
    """A model in memory."""

    format = "held"

    def __init__(self, shape, std: float = 0.2, dtype=torch.float32) -> None:
        self.path, self.config, self.dtype = Path("held"), shape, dtype
        self.layout, self.hf_metadata, self.tokenizer_files = {}, {}, []
        self.network = model.build(shape)
        model.init_weights(self.network, 1, std, shape.layers)
        random = torch.Generator().manual_seed(2)
        self.parameters = {
            name: parameter.data.add_(torch.randn(parameter.shape, generator=random) * 0.1)
            if parameter.ndim == 1
            else parameter.data
            for name, parameter in self.network.named_parameters()
        }

    def names(self):
        return list(self.parameters)

    def sizes(self):
        return {name: tuple(tensor.shape) for name, tensor in self.parameters.items()}

    def tensor(self, name):
        return self.parameters[name].to(self.dtype)


def written(tmp_path, name: str, to: str = "hf", **options) -> Path:
    """A model of a kind, written as a format."""
    folder = tmp_path / f"{name}-{to}"
    convert(Held((SHAPES | EXPERTS)[name]), folder, Target(to, **options))
    return folder


def assert_equal(a: CheckpointSource, b: CheckpointSource) -> None:
    """Hold two sources to the same weights, bit for bit. Padding of the vocabulary is nobody's."""
    assert a.config == b.config
    assert set(a.names()) == set(b.names())
    for name in a.names():
        rows = a.config.vocab if name in ("embed.weight", "head.weight") else None
        assert torch.equal(a.tensor(name)[:rows], b.tensor(name)[:rows]), name
