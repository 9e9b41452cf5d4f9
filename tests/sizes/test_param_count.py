import pytest
import torch

from steelyard import model
from steelyard.core.recipe import load_recipe
from steelyard.sizes.param_count import flops_per_token, parameters

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
