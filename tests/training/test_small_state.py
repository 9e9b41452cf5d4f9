"""AdamW with its state in 16 or 8 bits, against AdamW in fp32."""

import pytest
import torch

from steelyard import training
from steelyard.core.errors import UserError
from steelyard.core.recipe import load_recipe
from steelyard.core.recipe.optim_section import OptimSection
from steelyard.training.optimizer import Optimizer
from steelyard.training.optimizers import state_codes as codes
from steelyard.training.optimizers.small_adamw import plain_update
from tests.training.test_muon import shard

KINDS = ["bf16", "int8"]


def values(size: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, generator=generator) * torch.logspace(-6, 0, size)


@pytest.mark.parametrize("kind", KINDS)
def test_rounding_is_unbiased_and_repeats_itself(kind):
    first, second = values(1000), values(1000, 1).square() + 1e-9
    state = codes.empty(first, kind)
    sums, count = torch.zeros(2, 1000, dtype=torch.float64), 400
    for step in range(count):
        codes.write(state, kind, first, second, codes.noise_of(7, torch.tensor(float(step)), 0, 1000))
        sums += torch.stack(codes.read(state, kind))
    means = sums / count
    scale = torch.stack([first.abs(), second])[:, -256:]
    assert ((means - torch.stack([first, second])).abs()[:, -256:] < 0.02 * scale + 1e-4 * scale.amax()).all()
    again = codes.empty(first, kind)
    codes.write(again, kind, first, second, codes.noise_of(7, torch.tensor(float(count - 1)), 0, 1000))
    assert all(torch.equal(again[name], state[name]) for name in state)


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_read_is_stored_as_it_was(kind):
    first, second = values(1000), values(1000, 1).square()
    state, again = codes.empty(first, kind), codes.empty(first, kind)
    codes.write(state, kind, first, second, codes.noise_of(7, torch.tensor(1.0), 0, 1000))
    codes.write(again, kind, *codes.read(state, kind), None)
    assert all(torch.equal(again[name], state[name]) for name in state)


def test_shards_of_rows_have_the_noise_of_the_whole():
    step = torch.tensor(3.0)
    whole = codes.noise_of(5, step, 0, 600)
    for one, other in zip(whole, codes.noise_of(5, step, 200, 400), strict=True):
        assert torch.equal(one[200:], other)
    assert abs(whole[0].double().mean() / 65536 - 0.5) < 0.05
    assert abs(torch.corrcoef(torch.stack([each.double() for each in whole]))[0, 1]) < 0.15


@pytest.mark.parametrize(("kind", "tolerance"), [("bf16", 0.02), ("int8", 0.1)])
def test_a_hundred_steps_stay_near_those_with_fp32_state(kind, tolerance):
    generator = torch.Generator().manual_seed(2)
    target, first = torch.randn(2, 40, 30, generator=generator)
    moved = []
    for state in ("fp32", kind):
        parameter = torch.nn.Parameter(first.clone())
        optimizer = Optimizer([shard(parameter)], OptimSection(state=state, weight_decay=0.0), on_host=False)
        noise = torch.Generator().manual_seed(3)
        for _ in range(100):
            gradient = parameter.detach() - target + 0.5 * torch.randn(40, 30, generator=noise)
            parameter.grad = 4 * gradient
            optimizer.step(0.01, torch.tensor(4.0), torch.zeros(()), None)
        parameter.grad = torch.full_like(first, torch.inf)
        before = [
            parameter.detach().clone(),
            *(v.clone() for v in optimizer.torch.state[optimizer.tensors[0]].values()),
        ]
        optimizer.step(0.01, torch.tensor(torch.inf), torch.ones(()), None)
        after = [parameter.detach(), *optimizer.torch.state[optimizer.tensors[0]].values()]
        assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
        moved.append(parameter.detach() - first)
    assert (moved[1] - moved[0]).norm() < tolerance * moved[0].norm()
    assert (moved[1] - moved[0]).norm() > 1e-5 * moved[0].norm(), "the state is not small"


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_resumes_exactly_and_with_another_kind_of_state(in_workplace, kind):
    settings = [f"optim.state={kind}", "optim.schedule=constant", "optim.learning_rate=3e-3", "eval.every=0"]
    whole = training.run(load_recipe("tiny.toml", [*settings, "train.steps=16", "name=whole"]))
    training.run(load_recipe("tiny.toml", [*settings, "train.steps=8", "name=parts"]))
    parts = training.run(load_recipe("tiny.toml", [*settings, "train.steps=16", "name=parts"]))
    losses = [[r["loss"] for r in run.metrics() if "loss" in r] for run in (whole, parts)]
    assert losses[0] == losses[1]
    other = training.run(load_recipe("tiny.toml", ["optim.state=fp32", *settings[1:], "train.steps=20", "name=parts"]))
    back = training.run(load_recipe("tiny.toml", [*settings, "train.steps=24", "name=parts"]))
    assert [r["step"] for r in back.metrics() if "loss" in r][-1] == 24
    assert other.path == back.path
    fp32 = training.run(load_recipe("tiny.toml", ["optim.state=fp32", *settings[1:], "train.steps=24", "name=fp32"]))
    ends = [[r["loss"] for r in run.metrics() if "loss" in r][-1] for run in (back, fp32)]
    assert ends[0] == pytest.approx(ends[1], rel=0.02)


@pytest.mark.parametrize("overrides", [["optim.name=muon"], ["optim.name=sgd"], ["optim.offload=true"]])
def test_small_state_is_for_adamw_on_the_gpu(overrides):
    with pytest.raises(UserError, match=r"optim.state"):
        load_recipe("gpt2-small", ["optim.state=int8", *overrides])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_the_kernel_does_what_plain_torch_does(kind):
    pytest.importorskip("triton")
    from steelyard.training.optimizers import small_adamw_kernel

    device = "cuda" if torch.cuda.is_available() else "cpu"
    results = []
    for update in (plain_update, small_adamw_kernel.update):
        generator = torch.Generator().manual_seed(4)
        parameter = torch.randn(2500, generator=generator).to(device)
        state = codes.empty(parameter, kind)
        for found in (0.0, 0.0, 1.0, 0.0):
            gradient = torch.randn(2500, generator=generator).to(device) * (torch.inf if found else 8.0)
            flag, scale = torch.tensor(found, device=device), torch.tensor(8.0, device=device)
            update(parameter, gradient, state, kind, scale, flag, (3_000_000_000, 77), (0.1, (0.9, 0.95), 1e-8, 0.1))
            state["step"] += 1 - flag
        results.append([parameter, *codes.read(state, kind)])
    for plain, kernel in zip(*results, strict=True):
        torch.testing.assert_close(kernel, plain, rtol=0.05, atol=0.02 * plain.abs().max().item())
        assert (kernel - plain).abs().mean() < 1e-3 * plain.abs().mean()
