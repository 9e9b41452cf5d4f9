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
