"""`optim.gradients = "bf16"`: gradients of two bytes, against those of four."""

import numpy as np
import pytest
import torch

from steelyard import training
from steelyard.core.errors import UserError
from steelyard.core.recipe import load_recipe
from steelyard.core.recipe.optim_section import OptimSection
from steelyard.parallel import mesh
from steelyard.sizes.memory import memory_of
from steelyard.tokens.dataloader import columns
from steelyard.training.engine import Engine
from steelyard.training.extension import Extension
from steelyard.training.optimizer import Optimizer
from tests.training.test_muon import shard

BF16 = ["train.precision=bf16", "optim.gradients=bf16"]
TIED = "model={family='gpt', layers=2, hidden=32, heads=4, vocab=97, positions=16, tied=true}"


def engine_after_a_backward_pass(*overrides: str) -> Engine:
    """An engine that holds the gradients of four micro-batches."""
    recipe = load_recipe("tiny.toml", ["train.micro_batch=1", "train.precision=bf16", *overrides])
    engine = Engine(recipe, mesh.alone(), torch.device("cpu"), Extension(), None)
    engine.initialise()
    tokens = np.random.RandomState(0).randint(0, 97, (4, 17))
    engine.forward_and_backward(engine.batch_of(columns(tokens)), 1 / 64)
    engine.gradients.finish()
    return engine


@pytest.mark.parametrize("model", ["", TIED], ids=["llama", "tied"])
def test_gradients_have_two_bytes_and_the_norm_is_that_of_fp32(in_workplace, model):
    more = [model] if model else []
    narrow = engine_after_a_backward_pass(*more, "optim.gradients=bf16")
    wide = engine_after_a_backward_pass(*more)
    ours, theirs = ([part.gradient for part in engine.param_shards] for engine in (narrow, wide))
    assert {gradient.dtype for gradient in ours} == {torch.bfloat16}
    assert {gradient.dtype for gradient in theirs} == {torch.float32}
    counted = memory_of(narrow.recipe, 1)[0].gradients
    assert sum(gradient.nbytes for gradient in ours) == counted
    for one, other in zip(ours, theirs, strict=True):
        assert (one.double() - other.double()).norm() < 2**-7 * other.double().norm()
    norm, _ = narrow.gradients.norm_with(torch.zeros(1))
    exact = sum(gradient.double().square().sum() for gradient in ours).sqrt()
    assert norm == pytest.approx(exact.item(), rel=1e-6)


OPTIMIZERS = {
    "adamw": OptimSection(),
    "int8": OptimSection(state="int8"),
    "sgd": OptimSection(name="sgd"),
    "sgd-sai": OptimSection(name="sgd-sai"),
    "muon": OptimSection(name="muon", muon_precision="fp32"),
    "offload": OptimSection(offload=True),
}


def weights_after_steps(optim: OptimSection, dtype: torch.dtype, device: str) -> torch.Tensor:
    """The weights after four steps with the same gradients, stored in a dtype."""
    generator = torch.Generator().manual_seed(0)
    first = torch.randn(256, 256, generator=generator).to(device)
    parameter = torch.nn.Parameter(first.clone())
    parameter.grad_dtype = dtype
    one = shard(parameter)
    optimizer = Optimizer([one], optim, on_host=optim.offload)
    for _ in range(4):
        parameter.grad = torch.randn(256, 256, generator=generator).bfloat16().to(device, dtype)
        ratios = {one: torch.tensor(1.0, device=device)} if optimizer.needs_ratios else None
        scale = torch.tensor(3.0, device=device)
        optimizer.step(0.01, scale, torch.zeros((), device=device), ratios)
    state = optimizer.torch.state[optimizer.tensors[0]]
    assert all(value.dtype != torch.bfloat16 for value in state.values())
    assert not torch.equal(parameter, first)
    return parameter.detach()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_computes_in_fp32_from_bf16_gradients(name):
    narrow, wide = (weights_after_steps(OPTIMIZERS[name], each, "cpu") for each in (torch.bfloat16, torch.float32))
    assert torch.equal(narrow, wide)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_kernels_do_too(name):
    pytest.importorskip("triton")
    narrow, wide = (weights_after_steps(OPTIMIZERS[name], each, "cuda") for each in (torch.bfloat16, torch.float32))
    assert torch.allclose(narrow, wide, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_run_stays_near_fp32_gradients_and_resumes_exactly(in_workplace):
    settings = [*BF16, "optim.schedule=constant", "optim.learning_rate=3e-3", "eval.every=0", "train.micro_batch=1"]
    whole = training.run(load_recipe("tiny.toml", [*settings, "train.steps=8", "name=whole"]))
    training.run(load_recipe("tiny.toml", [*settings, "train.steps=4", "name=parts"]))
    parts = training.run(load_recipe("tiny.toml", [*settings, "train.steps=8", "name=parts"]))
    fp32 = [*settings, "optim.gradients=fp32", "train.steps=8", "name=fp32"]
    fp32 = training.run(load_recipe("tiny.toml", fp32))
    ours, again, theirs = ([r["loss"] for r in run.metrics() if "loss" in r] for run in (whole, parts, fp32))
    assert ours == again
    assert ours != theirs
    assert ours == pytest.approx(theirs, rel=0.005)


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (["train.precision=fp32"], "less precise"),
        (["train.precision=fp16"], "less precise"),
        (["sparsity.method=learned", "sparsity.base=here"], "masks"),
        (["finetune.adapter.rank=8", "finetune.data=here"], "adapters"),
    ],
)
def test_bf16_gradients_are_refused_where_weights_are_not_trained_in_bf16(overrides, why):
    with pytest.raises(UserError, match=why) as caught:
        load_recipe("llama3.2-1b", [*BF16, *overrides])
    assert "optim.gradients" in str(caught.value)
