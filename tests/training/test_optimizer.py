import pytest
import torch

from steelyard import training
from steelyard.core.recipe import load_recipe
from steelyard.core.recipe.optim_section import OptimSection
from steelyard.core.recipe.optimizers import OPTIMIZERS
from steelyard.parallel.param_shards import ParamShard
from steelyard.training.optimizer import Optimizer
from steelyard.training.optimizers.sgd import Sgd
from steelyard.training.optimizers.sgd_sai import SgdSai


def gradients(steps: int, size: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(size, generator=generator) for _ in range(steps)]


def walked(optimizer, parameter, steps):
    if isinstance(optimizer, Sgd):
        optimizer.grad_scale, optimizer.found_inf = torch.ones(()), torch.zeros(())
    for gradient in steps:
        parameter.grad = gradient.clone()
        if getattr(optimizer, "needs_ratios", False):
            optimizer.start({parameter: gradient.norm() / (gradient.std() + 1e-8)})
        optimizer.step()
    return parameter.detach()


def test_sgd_is_torchs_with_decoupled_decay():
    ours, theirs = (torch.nn.Parameter(torch.ones(6)) for _ in range(2))
    steps = gradients(5, 6)
    plain = walked(Sgd([{"params": [ours]}], 0.1, 0.9), ours, steps)
    torch.testing.assert_close(plain, walked(torch.optim.SGD([theirs], 0.1, momentum=0.9), theirs, steps))
    decayed = torch.nn.Parameter(torch.ones(6))
    walked(Sgd([{"params": [decayed], "weight_decay": 0.5}], 0.1, 0.9), decayed, [torch.zeros(6)])
    torch.testing.assert_close(decayed.detach(), torch.full((6,), 0.95))


def test_sgd_sai_follows_its_definition():
    parameter = torch.nn.Parameter(torch.ones(8))
    steps = gradients(4, 8)
    moved = walked(SgdSai([{"params": [parameter], "weight_decay": 0.1}], 0.01, 0.9), parameter, steps)
    expected, momentum = torch.ones(8), steps[0]
    ratio = steps[0].norm() / (steps[0].std() + 1e-8)
    for number, gradient in enumerate(steps):
        momentum = 0.9 * momentum + 0.1 * gradient if number else gradient
        expected = expected * (1 - 0.01 * 0.1) - 0.01 * ratio * momentum
    torch.testing.assert_close(moved, expected)


def part(name: str, size: int) -> ParamShard:
    parameter = torch.nn.Parameter(torch.ones(size, size))
    return ParamShard(name, parameter, parameter.detach(), (size, size), (0, 0), 1, *[False] * 5, is_matrix=True)


@pytest.mark.parametrize(
    ("name", "on_host"),
    [(name, on_host) for name in OPTIMIZERS for on_host in (False, True) if name != "muon"] + [("muon", False)],
)
def test_gradients_are_divided_by_their_scale_and_a_step_that_overflowed_moves_nothing(name, on_host):
    optim = OptimSection(name=name, learning_rate=0.1)
    steps = [gradient.view(3, 3) for gradient in gradients(3, 9)]
    plain, scaled = part("a.weight", 3), part("a.weight", 3)
    ratios = torch.tensor(2.0)
    for each, scale in ((plain, 1.0), (scaled, 64.0)):
        optimizer = Optimizer([each], optim, on_host)
        for number, gradient in enumerate(steps):
            each.parameter.grad = gradient * scale
            first = {each: ratios} if optimizer.needs_ratios else None
            optimizer.step(0.1, torch.tensor(scale), torch.tensor(False), first)
            assert each.parameter.grad is None
            if each is scaled and number == 1:
                before = each.tensor.clone()
                each.parameter.grad = torch.full((3, 3), torch.inf)
                optimizer.step(0.1, torch.tensor(torch.inf), torch.tensor(True), None)
                assert torch.equal(each.tensor, before)
    assert not torch.equal(plain.tensor, torch.ones(3, 3))
    torch.testing.assert_close(scaled.tensor, plain.tensor)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_made_for_loading_moves_nothing_and_has_the_names_of_a_checkpoint(name):
    own, loaded = part("a.weight", 3), part("a.weight", 3)
    stepped, made = (Optimizer([each], OptimSection(name=name), False) for each in (own, loaded))
    own.parameter.grad = torch.ones(3, 3)
    stepped.step(0.1, torch.ones(()), torch.tensor(False), {own: torch.ones(())} if name == "sgd-sai" else None)
    made.make_state()
    assert torch.equal(loaded.tensor, torch.ones(3, 3))
    ours, theirs = (each.state_shards(saving, lambda _: True) for each, saving in ((stepped, True), (made, False)))
    assert {key: piece.shape for key, piece in ours.items()} == {key: piece.shape for key, piece in theirs.items()}
    assert all(key.startswith("optimizer.a.weight.") for key in ours)
    assert all(not piece.tensor.any() for piece in theirs.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["muon", "sgd", "sgd-sai"])
def test_its_state_is_saved_and_a_continued_run_is_the_same(in_workplace, name):
    settings = [f"optim.name={name}", "optim.schedule=constant", "optim.learning_rate=3e-3", "eval.every=0"]
    whole = training.run(load_recipe("tiny.toml", [*settings, "train.steps=20", "name=whole"]))
    training.run(load_recipe("tiny.toml", [*settings, "train.steps=8", "name=parts"]))
    parts = training.run(load_recipe("tiny.toml", [*settings, "train.steps=20", "name=parts"]))
    losses = [[r["loss"] for r in run.metrics() if "loss" in r] for run in (whole, parts)]
    assert losses[0] == losses[1]
    assert losses[0][-1] < losses[0][0]
