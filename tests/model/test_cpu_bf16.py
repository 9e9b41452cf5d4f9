"""Products and attention in bf16 through fp32, on any CPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from steelyard.model import cpu_bf16


@pytest.fixture(autouse=True)
def replaced() -> Iterator[None]:
    cpu_bf16.replace_kernels()
    yield
    cpu_bf16._libraries.pop()._destroy()


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


@pytest.mark.parametrize(
    "compute",
    [
        lambda x, y: x @ y.T,
        lambda x, y: F.linear(x, y, y[:, 0]),
        lambda x, y: torch.bmm(x.view(4, 8, 16), y.view(4, 8, 16).transpose(1, 2)),
        lambda x, y: torch.baddbmm(x.view(4, 8, 16)[..., :8], x.view(4, 8, 16), y.view(4, 16, 8)),
        lambda x, y: F.scaled_dot_product_attention(*(a.view(1, 2, 16, 16) for a in (x, y, x)), is_causal=True),
        lambda x, y: F.scaled_dot_product_attention(
            *(a.view(1, 2, 16, 16) for a in (x, y, x)), attn_mask=x[:16, :16] - 1
        ),
    ],
)
def test_results_and_gradients_are_those_of_fp32_rounded_once(compute):
    inputs = [normal(32, 16).requires_grad_(), normal(32, 16).requires_grad_()]
    exact = [each.detach().float().requires_grad_() for each in inputs]
    results = []
    for group in (inputs, exact):
        result = compute(*group)
        result.backward(normal(*result.shape).to(result.dtype))
        results.append([result.detach(), *(each.grad for each in group)])
    for found, expected in zip(*results, strict=True):
        assert found.dtype == torch.bfloat16
        # One rounding for the product itself; a gradient that flows through two products is rounded in between.
        assert (found - expected).abs().max() < 2**-6 * expected.abs().max()


def test_fp32_is_left_alone():
    x = normal(32, 16).float()
    found = x @ x.T
    cpu_bf16._libraries.pop()._destroy()
    try:
        assert torch.equal(found, x @ x.T)
    finally:
        cpu_bf16.replace_kernels()


def test_a_product_into_a_tensor_is_rounded_once():
    x, y, out = normal(8, 4), normal(4, 8), torch.empty(8, 8, dtype=torch.bfloat16)
    torch.mm(x, y, out=out)
    assert torch.equal(out, (x.float() @ y.float()).bfloat16())
    torch.addmm(x[:, 0], x, y, out=out)
    assert torch.equal(out, torch.addmm(x[:, 0].float(), x.float(), y.float()).bfloat16())


def test_autograd_keeps_the_tensors_in_bf16():
    kept: list[torch.dtype] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.append(tensor.dtype) or tensor, lambda tensor: tensor
    ):
        F.linear(normal(8, 4).requires_grad_(), normal(4, 4).requires_grad_())
    assert set(kept) == {torch.bfloat16}
