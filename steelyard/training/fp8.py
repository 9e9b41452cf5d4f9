"""Linear layers in fp8: twice the FLOP/s of bf16 on GPUs that support it.

Each tensor is scaled by its current absolute maximum (dynamic scaling), so there is no state between steps. Inputs and
weights are e4m3 (more precision), gradients e5m2 (more range). Products accumulate in fp32 and are returned in bf16,
weight gradients in the dtype of the weights. Norms, attention, experts, the head and the residual stream are unchanged.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from steelyard.model import LanguageModel
from steelyard.model.modules import Linear

FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2
MULTIPLE = 16  # Every dimension of an fp8 product must be a multiple of this.


def convert(model: LanguageModel) -> None:
    """Make the linear modules of all layers compute in fp8, if their sizes allow it."""
    for module in model.layers.modules():
        if isinstance(module, Linear) and not any(size % MULTIPLE for size in module.weight.shape):
            module.product = product


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x @ weight.T + bias with both factors rounded to fp8."""
    rows: Tensor = _Fp8Function.apply(x.flatten(0, -2), weight)  # type: ignore[no-untyped-call]
    y = rows.view(*x.shape[:-1], weight.shape[0])
    return y if bias is None else y + bias.to(y.dtype)


def scaled(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A tensor in fp8, and the factor that reverses the scaling."""
    factor = torch.finfo(dtype).max / x.abs().amax().float().clamp(min=1e-12)
    largest = torch.finfo(dtype).max
    return (x.float() * factor).clamp(-largest, largest).to(dtype), factor.reciprocal()


class _Fp8Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, weight_OD: Tensor) -> Tensor:
        x, of_x = scaled(x_ND, FORWARD)
        weight, of_weight = scaled(weight_OD, FORWARD)
        ctx.save_for_backward(x, of_x, weight, of_weight)
        ctx.weight_dtype = weight_OD.dtype
        return torch._scaled_mm(x, weight.t(), of_x, of_weight, out_dtype=x_ND.dtype, use_fast_accum=True)

    @staticmethod
    def backward(ctx: Any, grad_NO: Tensor) -> tuple[Tensor, Tensor]:
        x, of_x, weight, of_weight = ctx.saved_tensors
        grad, of_grad = scaled(grad_NO, BACKWARD)
        # The second operand must be column-major: a transposed copy, which the compiler fuses with the rounding.
        grad_x = torch._scaled_mm(grad, weight.t().contiguous().t(), of_grad, of_weight, out_dtype=grad_NO.dtype)
        grad_weight = torch._scaled_mm(
            grad.t().contiguous(), x.t().contiguous().t(), of_grad, of_x, out_dtype=ctx.weight_dtype
        )
        return grad_x, grad_weight
