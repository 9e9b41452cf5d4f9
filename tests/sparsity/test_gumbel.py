"""Drawn masks: noise that is Gumbel's and the same everywhere, and a gradient that is the mask's own."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from steelyard.sparsity import gumbel
from steelyard.sparsity.gumbel import GroupOffset

TWO_OF_FOUR = torch.tensor(
    [mask for mask in itertools.product((1.0, 0.0), repeat=4) if sum(mask) == 2]  # 1100, 1010, 1001, 0110, 0101, 0011
)
WHOLE = GroupOffset(0, 0, 8)


def drawn(sample: int, name: str = "layers.0.mlp.up.weight", shape: tuple[int, int, int] = (16, 8, 6)) -> Tensor:
    return gumbel.noise(
        gumbel.draw_of(torch.tensor([sample])), gumbel.salt_of(1, name), shape, GroupOffset(0, 0, shape[1])
    )


def test_noise_follows_gumbels_distribution():
    values = drawn(3, shape=(512, 256, 6)).double().flatten()
    assert torch.isfinite(values).all()
    for at in (-2.0, -1.0, 0.0, 1.0, 3.0, 6.0, 10.0):
        expected = torch.exp(-torch.exp(torch.tensor(-at, dtype=torch.float64)))
        deviation = (expected * (1 - expected) / len(values)).sqrt()
        assert abs((values <= at).double().mean() - expected) < 4 * deviation + 1e-9


def test_noise_of_neighbours_samples_and_parameters_is_unrelated():
    values = drawn(7, shape=(256, 256, 6))
    others = [
        (values[:-1], values[1:]),
        (values[:, :-1], values[:, 1:]),
        (values[..., :-1], values[..., 1:]),
        (values, drawn(8, shape=(256, 256, 6))),
        (values, drawn(7 + (1 << 32), shape=(256, 256, 6))),
        (values, drawn(7, "layers.1.mlp.up.weight", (256, 256, 6))),
    ]
    for one, other in others:
        correlation = torch.corrcoef(torch.stack([one.flatten(), other.flatten()]))[0, 1]
        assert abs(correlation) < 4 / one.numel() ** 0.5


def test_a_part_draws_its_part_of_the_whole():
    whole = drawn(5)
    draw, salt = gumbel.draw_of(torch.tensor([5, 6])), gumbel.salt_of(1, "layers.0.mlp.up.weight")
    assert torch.equal(gumbel.noise(draw, salt, (4, 8, 6), GroupOffset(8, 0, 8)), whole[8:12])
    assert torch.equal(gumbel.noise(draw, salt, (16, 4, 6), GroupOffset(0, 4, 8)), whole[:, 4:])


def test_noise_is_what_the_written_formula_gives():
    """In Python's own integers. Resumed runs depend on it, and kernels are written against it."""
    assert gumbel.salt_of(1, "name") == (-2099960002, -1666829507)
    assert gumbel.draw_of(torch.tensor([(1 << 33) + 5])).tolist() == [5, -847419637]

    def mix(x: int) -> int:
        x = (x ^ (x >> 16)) * 0x85EBCA6B % (1 << 32)
        x = (x ^ (x >> 13)) * 0xC2B2AE35 % (1 << 32)
        return x ^ (x >> 16)

    offset, rows, groups = GroupOffset(70_000, 3, 40_000), 3, 5  # an index beyond 31 bits
    found = gumbel.noise(torch.tensor([5, -9], dtype=torch.int32), (-7, 11), (rows, groups, 4), offset)
    keys = [mix((5 - 7) % (1 << 32)), mix(-9 + 11)]
    for row, group, candidate in itertools.product(range(rows), range(groups), range(4)):
        index = ((70_000 + row) * 40_000 + 3 + group) * 0x9E3779B1 + keys[0]
        word = mix((mix(index % (1 << 32)) + keys[1] + candidate * 0x85157AF5) % (1 << 32))
        uniform = ((word >> 9) + 0.5) / (1 << 23)
        assert found[row, group, candidate] == pytest.approx(-math.log(-math.log(uniform)), rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("hard", [False, True])
def test_the_gradient_is_that_of_the_written_formula(hard: bool):
    torch.manual_seed(0)
    weight, logits = torch.randn(16, 32).double(), torch.randn(16, 8, 6).double().requires_grad_()
    candidates, probe = TWO_OF_FOUR.double(), torch.randn(16, 32).double()
    scale, temperature, reg = 1.7, 0.8, 0.03
    noise = drawn(5).double()
    choice = torch.softmax((logits * scale + noise) / temperature, dim=-1)
    mask = (choice @ candidates).flatten(1)
    if hard:
        mask = mask + (candidates[choice.argmax(-1)].flatten(1) - mask).detach()
    ((weight * mask * probe).sum() - reg * (weight * mask).square().sum()).backward()
    mine = logits.detach().float().requires_grad_()
    product = gumbel.masked_weight(
        weight.float(), mine, TWO_OF_FOUR, gumbel.draw_of(torch.tensor([5])),
        torch.tensor([scale, temperature, reg]), gumbel.salt_of(1, "layers.0.mlp.up.weight"), WHOLE, hard,
    )  # fmt: skip
    (product * probe.float()).sum().backward()
    assert torch.allclose(product.double(), weight * mask.detach(), atol=1e-5)
    assert mine.grad is not None
    assert torch.allclose(mine.grad.double(), logits.grad, rtol=1e-4, atol=1e-5)


def test_the_prior_shifts_by_overlap():
    mask = torch.tensor([[True, True, False, False]])
    shift = gumbel.prior_shift(mask, TWO_OF_FOUR, std=0.01, strength=3.0)
    assert torch.allclose(shift[0, 0], torch.tensor([0.03, 0.0, 0.0, 0.0, 0.0, -0.03]))


def test_the_argmax_keeps_two_of_four():
    logits = torch.randn(16, 8, 6)
    mask = gumbel.argmax_mask(logits, TWO_OF_FOUR)
    assert mask.shape == (16, 32)
    assert (mask.unflatten(1, (-1, 4)).sum(-1) == 2).all()
    assert torch.equal(mask[0, :4], TWO_OF_FOUR[logits[0, 0].argmax()].bool())


def test_the_gradient_lies_as_the_logits_do():
    """Zero bubble hands it to the fused optimizer as it is, which reads it as if it lay like the parameter."""
    logits = torch.randn(16, 8, 6, requires_grad=True)
    anneal, draw = torch.tensor([1.0, 1.0, 0.0]), gumbel.draw_of(torch.tensor([5]))
    product = gumbel.masked_weight(torch.randn(16, 32), logits, TWO_OF_FOUR, draw, anneal, (1, 2), WHOLE, False)
    (gradient,) = torch.autograd.grad(product.sum(), logits)
    assert gradient.stride() == logits.stride()
