"""fp8 products against the same arithmetic in fp64: tensors rounded with their scales, then multiplied exactly."""

import math

import pytest
import torch

from steelyard.model.modules import Linear
from steelyard.training import fp8

PRODUCTS = {"tensor": fp8.tensor_product, "row": fp8.row_product}
BF16 = 2**-8  # of a result, rounded once
LARGEST = 448.0  # of e4m3


def drawn(rows: int, columns: int, seed: int) -> torch.Tensor:
    """Values whose rows and columns differ in size by factors of up to a thousand."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.logspace(-3, 0, rows)[torch.randperm(rows, generator=generator), None]
    return torch.randn(rows, columns, generator=generator) * sizes


def rounded_rows(x: torch.Tensor) -> torch.Tensor:
    """Each row as fp8 holds it, in fp64, with the scale computed value by value."""
    rows = []
    for row in x.double():
        scale = 2.0 ** math.floor(math.log2(LARGEST / row.abs().max().item()))
        rows.append((row * scale).to(torch.float8_e4m3fn).double() / scale)
    return torch.stack(rows)


def products(x: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor, product) -> list[torch.Tensor]:
    """Output, gradient of the input and gradient of the weight."""
    x, weight = x.detach().clone().requires_grad_(), weight.detach().clone().requires_grad_()
    y = product(x, weight, None)
    y.backward(grad)
    return [y.detach(), x.grad, weight.grad]


def inputs(device: str = "cpu") -> list[torch.Tensor]:
    x, weight, grad = drawn(48, 64, 0).bfloat16(), drawn(32, 64, 1), (1e-4 * drawn(48, 32, 2)).bfloat16()
    return [each.to(device) for each in (x, weight, grad)]


def test_row_scaled_products_are_those_of_the_rounded_rows():
    x, weight, grad = inputs()
    found = products(x, weight, grad, fp8.row_product)
    expected = [
        rounded_rows(x) @ rounded_rows(weight).T,
        rounded_rows(grad) @ rounded_rows(weight.T).T,
        rounded_rows(grad.T) @ rounded_rows(x.T).T,
    ]
    assert [each.dtype for each in found] == [torch.bfloat16, torch.bfloat16, torch.float32]
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours.double() - theirs).abs().max() < BF16 * theirs.abs().max()


def test_an_outlier_costs_other_rows_no_precision():
    x, weight, grad = inputs()
    x[5] = 2**20
    others = [number for number in range(len(x)) if number != 5]
    exact = (x.double() @ weight.double().T)[others]
    errors = {
        name: ((products(x, weight, grad, product)[0][others].double() - exact).norm() / exact.norm()).item()
        for name, product in PRODUCTS.items()
    }
    assert errors["row"] < 0.05
    assert errors["tensor"] > 0.5, "the outlier leaves no bits for the others"


def test_a_value_is_rounded_alike_along_rows_and_columns():
    x = drawn(32, 48, 3)
    by_row, by_column = fp8.scaled_rows(x), fp8.scaled_rows(x.t())
    one, other = by_row[0].float() * by_row[1], (by_column[0].float() * by_column[1]).t()
    is_normal = (by_row[0].float().abs() >= 2**-6) & (by_column[0].float().t().abs() >= 2**-6)
    assert is_normal.float().mean() > 0.5
    assert torch.equal(one[is_normal], other[is_normal])
    assert by_row[0].is_contiguous()
    assert by_column[0].is_contiguous()


@pytest.mark.parametrize("row", [0.0, 1e-30, 3e38])
def test_rows_of_any_size_stay_finite(row):
    x = torch.full((16, 16), 1.0)
    x[3] = row
    values, factors = fp8.scaled_rows(x)
    back = values.float() * factors
    assert torch.isfinite(back).all()
    assert torch.allclose(back, x, rtol=2**-4, atol=1e-12)


def test_an_input_that_is_not_finite_gives_a_gradient_that_is_not():
    x, weight, grad = inputs()
    grad[3, 4] = torch.nan
    _, grad_x, grad_weight = products(x, weight, grad, fp8.row_product)
    assert not torch.isfinite(grad_x[3]).all()
    assert not torch.isfinite(grad_weight).all()


def test_a_compiled_product_is_the_same():
    module = Linear(64, 32)
    module.product = fp8.row_product
    x = drawn(48, 64, 4).bfloat16().view(3, 16, 64)
    plain = module(x)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)(x)
    assert compiled.shape == (3, 16, 32)
    assert torch.equal(plain, compiled)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("scaling", PRODUCTS)
def test_a_gpu_computes_what_a_cpu_does(scaling, compiled):
    product = torch.compile(PRODUCTS[scaling], fullgraph=True) if compiled else PRODUCTS[scaling]
    expected = products(*inputs(), PRODUCTS[scaling])
    found = products(*inputs("cuda"), product)
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours.cpu().double() - theirs.double()).norm() < 1e-2 * theirs.double().norm()
