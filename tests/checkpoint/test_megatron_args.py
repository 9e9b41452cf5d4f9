"""What Megatron's args describe is read from the blocks of a model, whatever its family."""

import pytest
import torch

from steelyard.checkpoint.formats.megatron_args import args_of, config_from_args
from steelyard.checkpoint.formats.megatron_layout import MegatronLayout
from steelyard.core.errors import UserError
from steelyard.core.recipe import load_recipe

LAYOUT = MegatronLayout()


@pytest.mark.parametrize(
    ("recipe", "overrides", "reason"),
    [
        ("gemma2-2b", [], "attention that differs between layers"),
        ("gemma2-2b", ["model.full_every=1"], "soft caps"),
        ("smollm3-3b", [], "attention that differs between layers"),
        ("olmo2-1b", [], "norms after attention or MLP"),
        ("llama3.2-1b", ["model.window=128"], "sliding windows"),
        ("llama3.2-1b", ["model.rope_share=0.5"], "rotary positions of a part of each head"),
        ("llama3.2-1b", ["model.rope_scaling.kind=linear"], "RoPE scaling of the kind linear"),
        ("qwen3-0.6b", ["model.qkv_bias=true"], "a bias of the output of attention"),
        ("mixtral-8x7b", ["model.router_bias_rate=0.001"], "model.router_bias_rate with softmax scores"),
    ],
)
def test_what_megatron_cannot_compute_is_named(recipe, overrides, reason):
    config = load_recipe(recipe, overrides).model
    with pytest.raises(UserError, match=f"{reason}.* cannot be written for Megatron"):
        args_of(config, torch.bfloat16, {}, LAYOUT)


@pytest.mark.parametrize(
    ("recipe", "overrides"),
    [
        ("gpt2-small", []), ("llama3.1-8b", []), ("llama3.1-8b", ["model.qkv_bias=true"]), ("qwen3-0.6b", []),
        ("mixtral-8x7b", []), ("mixtral-8x7b", ["model.dense_layers=[0, 3]", "model.shared_ffn=512"]),
        ("qwen3-30b-a3b", ["model.router_score=sigmoid", "model.router_bias_rate=0.001"]),
    ],
)  # fmt: skip
def test_args_describe_the_same_blocks(recipe, overrides):
    config = load_recipe(recipe, overrides).model
    args = vars(args_of(config, torch.bfloat16, {}, LAYOUT))
    assert config_from_args(args, "here").blocks == config.blocks
