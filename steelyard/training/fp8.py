"""Linear layers in fp8: twice the FLOP/s of bf16 on GPUs that support it.

Scales come from the current absolute maxima (dynamic scaling), so there is no state between steps. Products accumulate
in fp32. Norms, attention, experts, the head and the residual stream are unchanged. `train.fp8_scaling` is one of

tensor   one scale per tensor. Inputs and weights are e4m3 (more precision), gradients e5m2 (more range).
row      one scale per row of each operand, along the contraction: an outlier costs only its own row precision, so
         gradients are e4m3 too. Each tensor is rounded twice, because the forward and the backward pass contract it
         along different dimensions. Scales are powers of two: both roundings of a value differ only by underflow.

A CPU computes the same products from the rounded values in fp32: the specification, which tests compare with.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from steelyard.model import LanguageModel
from steelyard.model.modules import Linear

FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2
MULTIPLE = 16  # Every dimension of an fp8 product must be a multiple of this.
SMALLEST = 1e-12  # A smaller maximum is not scaled up to the range of fp8.
EXPONENT = 0x7F800000  # the bits of an fp32 exponent


def convert(model: LanguageModel, scaling: str) -> None:
    """Make the linear modules of all layers compute in fp8, if their sizes allow it."""
    for module in model.layers.modules():
        if isinstance(module, Linear) and not any(size % MULTIPLE for size in module.weight.shape):
            module.product = row_product if scaling == "row" else tensor_product


def tensor_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x @ weight.T + bias with both factors rounded to fp8, one scale per tensor."""
    rows: Tensor = _TensorScaled.apply(x.flatten(0, -2), weight)  # type: ignore[no-untyped-call]
    return _with_bias(rows.view(*x.shape[:-1], weight.shape[0]), bias)


def row_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x @ weight.T + bias with both factors rounded to fp8, one scale per row."""
    rows: Tensor = _RowScaled.apply(x.flatten(0, -2), weight)  # type: ignore[no-untyped-call]
    return _with_bias(rows.view(*x.shape[:-1], weight.shape[0]), bias)


def scaled(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A tensor in fp8, and the factor that reverses the scaling."""
    factor = torch.finfo(dtype).max / x.abs().amax().float().clamp(min=SMALLEST)
    return _rounded(x, factor, dtype), factor.reciprocal()


def scaled_rows(x_RK: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix in fp8, and for each row the factor that reverses its scaling, of shape (R, 1)."""
    factor = torch.finfo(FORWARD).max / x_RK.abs().amax(dim=1, keepdim=True).float().clamp(min=SMALLEST)
    factor = (factor.view(torch.int32) & EXPONENT).view(torch.float32)  # rounded down to a power of two
    return _rounded(x_RK, factor, FORWARD).contiguous(), factor.reciprocal()


def _rounded(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    largest = torch.finfo(dtype).max
    return (x.float() * factor).clamp(-largest, largest).to(dtype)


def _with_bias(y: Tensor, bias: Tensor | None) -> Tensor:
    return y if bias is None else y + bias.to(y.dtype)


def _matmul(a: Tensor, b: Tensor, of_a: Tensor, of_b: Tensor, dtype: torch.dtype, fast: bool = False) -> Tensor:
    """a @ b, where `of_a` and `of_b` reverse the scaling. `fast` sums in the tensor cores with fewer bits."""
    if a.is_cuda:
        return torch._scaled_mm(a, b, of_a, of_b, out_dtype=dtype, use_fast_accum=fast)
    return ((a.float() * of_a) @ (b.float() * of_b)).to(dtype)


class _TensorScaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, weight_OD: Tensor) -> Tensor:
        x, of_x = scaled(x_ND, FORWARD)
        weight, of_weight = scaled(weight_OD, FORWARD)
        ctx.save_for_backward(x, of_x, weight, of_weight)
        ctx.weight_dtype = weight_OD.dtype
        return _matmul(x, weight.t(), of_x, of_weight, x_ND.dtype, fast=True)

    @staticmethod
    def backward(ctx: Any, grad_NO: Tensor) -> tuple[Tensor, Tensor]:
        x, of_x, weight, of_weight = ctx.saved_tensors
        grad, of_grad = scaled(grad_NO, BACKWARD)
        # The second operand must be column-major: a transposed copy, which the compiler fuses with the rounding.
        grad_x = _matmul(grad, weight.t().contiguous().t(), of_grad, of_weight, grad_NO.dtype)
        grad_weight = _matmul(grad.t().contiguous(), x.t().contiguous().t(), of_grad, of_x, ctx.weight_dtype)
        return grad_x, grad_weight


class _RowScaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, weight_OD: Tensor) -> Tensor:
        x, of_x = scaled_rows(x_ND)
        weight, of_weight = scaled_rows(weight_OD)
        # The backward pass contracts tokens and outputs: it needs both tensors scaled by columns, also in fp8.
        ctx.save_for_backward(*scaled_rows(x_ND.t()), *scaled_rows(weight_OD.t()))
        ctx.weight_dtype = weight_OD.dtype
        return _matmul(x, weight.t(), of_x, of_weight.t(), x_ND.dtype, fast=True)

    @staticmethod
    def backward(ctx: Any, grad_NO: Tensor) -> tuple[Tensor, Tensor]:
        x_DN, of_x, weight_DO, of_weight = ctx.saved_tensors
        grad, of_grad = scaled_rows(grad_NO)
        grad_x = _matmul(grad, weight_DO.t(), of_grad, of_weight.t(), grad_NO.dtype)
        grad, of_grad = scaled_rows(grad_NO.t())
        # Row scales and an fp32 result together exist only on Hopper.
        grad_weight = _matmul(grad, x_DN.t(), of_grad, of_x.t(), grad_NO.dtype)
        return grad_x, grad_weight.to(ctx.weight_dtype)
