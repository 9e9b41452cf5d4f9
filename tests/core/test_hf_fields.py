"""Fields of published config.json files: what they mean, and which are refused by name."""

import pytest
import torch

from steelyard.checkpoint.formats.hf_config import config_from_hf, config_to_hf
from steelyard.core.errors import UserError

SIZES = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32768,
}  # fmt: skip
LOCAL, FULL = "sliding_attention", "full_attention"


def config(architecture, **fields):
    return config_from_hf({"architectures": [f"{architecture}ForCausalLM"], **SIZES, **fields}, "config.json")


@pytest.mark.parametrize(
    ("architecture", "fields", "values"),
    [
        ("Llama", {"sliding_window": 4096}, {"window": None}),
        ("Llama", {"rope_theta": 5e5, "rope_parameters": {"rope_theta": 5e5}}, {"rope_theta": 5e5}),
        ("Llama", {"max_sequence_length": 2048, "pretraining_tp": 1}, {"rope_theta": 1e4}),
        ("Mistral", {}, {"window": 4096}),
        ("Mistral", {"sliding_window": None}, {"window": None}),
        ("Qwen2", {"sliding_window": 131072, "use_mrope": False, "max_window_layers": 4}, {"window": None}),
        ("Qwen2", {"use_sliding_window": False, "sliding_window": 8, "attention_bias": True}, {"qkv_bias": True}),
        ("Qwen2", {"use_sliding_window": True, "sliding_window": 8}, {"window": None}),
        ("Qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}, {"window": 8}),
        ("Qwen3", {"sliding_window": None, "max_window_layers": 6}, {"head_dim": 128, "window": None}),
        ("Qwen3", {"layer_types": [FULL] * 6, "use_sliding_window": False}, {"window": None}),
        ("SmolLM3", {"no_rope_layers": [1, 1, 1, 0, 1, 1]}, {"rope_theta": 2e6, "no_rope_every": 4}),
        ("Gemma2", {"sliding_window_size": 4096, "hidden_act": "gelu_pytorch_tanh"}, {"head_dim": 256}),
        ("Gemma2", {"attn_logit_softcapping": None}, {"attention_softcap": 0.0, "logit_softcap": 30.0}),
        ("Gemma3", {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window_pattern": 6}, {"full_every": 6}),
        ("Gemma3", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}, {"local_rope_theta": 1e4}),
        ("Gemma3", {"rope_parameters": {FULL: {"rope_theta": 3e6}, LOCAL: {"rope_theta": 2e4}}},
         {"rope_theta": 3e6, "local_rope_theta": 2e4}),
    ],
)  # fmt: skip
def test_a_field_means_what_it_means_in_transformers(architecture, fields, values):
    found = config(architecture, **fields)
    assert {key: getattr(found, key) for key in values} == values


@pytest.mark.parametrize(
    ("architecture", "fields", "said"),
    [
        ("Qwen2", {"use_mrope": True}, "use_mrope is True"),
        ("Qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 4}, "max_window_layers is 4"),
        ("Qwen3", {"layer_types": []}, "layer_types"),
        ("Qwen3", {"layer_types": {"a": 1}}, "must be a list"),
        ("Gemma2", {"layer_types": []}, "layer_types"),
        ("Gemma2", {"layer_types": [LOCAL, FULL]}, "layer_types"),
        ("Gemma3", {"rope_parameters": {LOCAL: [1]}}, "must be a table"),
        ("Gemma3", {"rope_parameters": {LOCAL: {"rope_type": "linear", "factor": 8.0}}}, "local RoPE"),
        ("Gemma3", {"rope_parameters": {"rope_theta": 7e5}}, "rope_parameters.rope_theta"),
        ("Gemma3", {"sliding_window_pattern": float("inf")}, "does not describe a valid model"),
        ("Llama", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "rope_theta": 1}, "above 1 for YaRN"),
        ("Llama", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "attn_factor": 2}}, "attn_factor"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(architecture, fields, said):
    with pytest.raises(UserError, match=said):
        config(architecture, **fields)


def test_a_soft_cap_that_is_off_stays_off():
    found = config("Gemma2", attn_logit_softcapping=None)
    again = type(found).model_validate(found.model_dump(exclude_none=True))
    assert again.blocks.layers[0].attention.softcap is None
    assert again.blocks.logit_softcap == 30.0
    assert config_to_hf(again, torch.float32, {})["attn_logit_softcapping"] is None
