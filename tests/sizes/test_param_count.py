import pytest
import torch

from steelyard import model
from steelyard.core.recipe import Recipe, load_recipe
from steelyard.sizes.param_count import described, flops_per_token, parameters

PUBLISHED = {
    "gpt2-small": 124_439_808,
    "gpt2-xl": 1_557_611_200,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama3.1-8b": 8_030_261_248,
    "llama3.2-3b": 3_212_749_824,
    "smollm2-135m": 134_515_008,
    "mistral-7b": 7_241_732_096,
    "qwen2-7b": 7_615_616_512,
    "llama3.2-1b": 1_235_814_400,
    "llama3.1-70b": 70_553_706_496,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "gemma2-2b": 2_614_341_888,
    "gemma2-9b": 9_241_705_984,
    "gemma3-1b": 999_885_952,
    "gemma3-4b": 3_880_263_168,
    "gemma3-12b": 11_766_034_176,
    "gemma3-27b": 27_009_346_304,
    "olmo2-1b": 1_484_916_736,
    "olmo2-7b": 7_298_617_344,
    "olmo2-13b": 13_716_198_400,
    "olmo2-32b": 32_234_279_936,
    "smollm3-3b": 3_075_098_624,
    "qwen3-30b-a3b": 30_532_122_624,
    "mixtral-8x7b": 46_702_792_704,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_of_the_published_model(name):
    assert parameters(load_recipe(name).model).total == PUBLISHED[name]


@pytest.mark.parametrize("name", [*PUBLISHED, "quickstart"])
def test_parameters_are_those_of_the_built_model(name):
    shape = load_recipe(name, ["model.vocab_multiple=1"]).model
    with torch.device("meta"):
        built = model.build(shape)
    assert parameters(shape).total == sum(parameter.numel() for parameter in built.parameters())


def test_flops_are_six_per_parameter_and_half_of_full_attention():
    shape = load_recipe("llama3.2-1b").model
    # 6N plus 12 x layers x hidden x length, halved for causal masks: the figure behind the usual MFU.
    assert flops_per_token(shape, 4096) == 6 * PUBLISHED["llama3.2-1b"] + 6 * 16 * 2048 * 4096


def with_experts(family, **more):
    return Recipe.model_validate({"name": "moe", "model": {"family": family, **more}}).model


def qwen3_30b():
    return with_experts(
        "qwen3-moe", layers=48, hidden=2048, heads=32, kv_heads=4, head_dim=128, ffn=6144, experts=128,
        experts_per_token=8, expert_ffn=768, vocab=151936, tied=False,
    )  # fmt: skip


def mixtral_8x7b():
    return with_experts(
        "mixtral", layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, experts=8, vocab=32000, tied=False
    )


def test_experts_count_in_total_and_the_chosen_ones_as_active():
    assert described(qwen3_30b()) == "30.5B (3.35B active)"
    assert described(mixtral_8x7b()) == "46.7B (12.9B active)"
    dense = parameters(load_recipe("llama3.2-1b").model)
    assert dense.active == dense.total


def test_flops_are_those_of_active_parameters():
    shape = mixtral_8x7b()
    active = parameters(shape).active - shape.vocab * shape.hidden  # The embedding is a lookup.
    assert flops_per_token(shape, 4096) == 6 * active + 6 * 32 * 4096 * 4096


@pytest.mark.parametrize("dense", [[], [0], [1, 4]])
def test_layers_that_differ_are_counted_one_by_one(dense):
    shape = with_experts(
        "qwen3-moe", layers=5, hidden=64, heads=4, head_dim=16, ffn=160, vocab=128, experts=8, experts_per_token=2,
        expert_ffn=32, shared_ffn=48, router_bias_rate=0.001, dense_layers=dense, vocab_multiple=1,
    )  # fmt: skip
    with torch.device("meta"):
        built = model.build(shape)
    assert parameters(shape).total == sum(parameter.numel() for parameter in built.parameters())


def test_expert_ranks_divide_experts_and_nothing_else():
    whole, part = parameters(qwen3_30b()), parameters(qwen3_30b(), expert=8)
    assert part.experts * 8 == whole.experts == 48 * 128 * 3 * 2048 * 768
    assert part.total - part.experts == whole.total - whole.experts
    assert part.active == whole.active
