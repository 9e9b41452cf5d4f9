import pytest
import torch

from steelyard import train
from steelyard.core.recipe import load
from steelyard.train.sgd import Sgd, SgdSai


def gradients(steps: int, size: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(size, generator=generator) for _ in range(steps)]


def walked(optimizer, parameter, steps):
    for gradient in steps:
        parameter.grad = gradient.clone()
        optimizer.step()
    return parameter.detach()


def test_sgd_is_torchs_with_decoupled_decay():
    ours, theirs = (torch.nn.Parameter(torch.ones(6)) for _ in range(2))
    steps = gradients(5, 6)
    plain = walked(Sgd([{"params": [ours]}], 0.1, 0.9), ours, steps)
    torch.testing.assert_close(plain, walked(torch.optim.SGD([theirs], 0.1, momentum=0.9), theirs, steps))
    decayed = torch.nn.Parameter(torch.ones(6))
    decayed.grad = torch.zeros(6)
    Sgd([{"params": [decayed], "weight_decay": 0.5}], 0.1, 0.9).step()
    torch.testing.assert_close(decayed.detach(), torch.full((6,), 0.95))


def test_sgd_sai_follows_its_definition():
    parameter = torch.nn.Parameter(torch.ones(8))
    steps = gradients(4, 8)
    moved = walked(SgdSai([{"params": [parameter], "weight_decay": 0.1}], 0.01, 0.9, 1e-8), parameter, steps)
    expected, momentum = torch.ones(8), steps[0]
    ratio = steps[0].norm() / (steps[0].std() + 1e-8)
    for number, gradient in enumerate(steps):
        momentum = 0.9 * momentum + 0.1 * gradient if number else gradient
        expected = expected * (1 - 0.01 * 0.1) - 0.01 * ratio * momentum
    torch.testing.assert_close(moved, expected)


@pytest.mark.parametrize("name", ["sgd", "sgd-sai"])
def test_its_state_is_saved_and_a_continued_run_is_the_same(in_workplace, name):
    settings = [f"optim.name={name}", "optim.schedule=constant", "optim.learning_rate=3e-3", "eval.every=0"]
    whole = train.run(load("tiny.toml", [*settings, "train.steps=20", "name=whole"]))
    train.run(load("tiny.toml", [*settings, "train.steps=8", "name=parts"]))
    parts = train.run(load("tiny.toml", [*settings, "train.steps=20", "name=parts"]))
    losses = [[r["loss"] for r in run.metrics() if "loss" in r] for run in (whole, parts)]
    assert losses[0] == losses[1]
    assert losses[0][-1] < losses[0][0]
