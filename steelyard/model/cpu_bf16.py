"""Products and attention in bf16 on ARM CPUs without bf16 instructions (Neoverse N1: Graviton 2, Ampere Altra).

PyTorch multiplies element by element there, 200 times slower than in fp32. `use_fp32_products` replaces these kernels:
operands are cast to fp32, and the result is rounded to bf16. CPUs with bf16 instructions also add in fp32 and round
once. What autograd saves stays in bf16.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
# Attention, and which of its results are bf16: the log-sum-exp is always fp32.
ATTENTION = {
    "_scaled_dot_product_flash_attention_for_cpu": (0,),
    "_scaled_dot_product_flash_attention_for_cpu_backward": (0, 1, 2),
}
_libraries: list[torch.library.Library] = []


def use_fp32_products() -> None:
    """Replace the kernels of this process if its CPU needs it. This costs 15 us per product, also for those in fp32."""
    if _libraries or platform.machine() not in ("aarch64", "arm64"):
        return
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        replace_kernels()


def replace_kernels() -> None:
    """Replace the kernels."""
    library = torch.library.Library("aten", "IMPL")
    for name in PRODUCTS:
        _replace(library, name, _rounded)
        _replace(library, f"{name}.out", _rounded_into)
    for name, places in ATTENTION.items():
        _replace(library, name, partial(_rounded_results, places))
    _libraries.append(library)  # The kernels live as long as their library.


def _replace(library: torch.library.Library, name: str, compute_in_fp32: Callable[..., Any]) -> None:
    operator, _, overload = name.partition(".")
    kernel = torch.library.get_kernel(getattr(getattr(torch.ops.aten, operator), overload or "default"), "CPU")

    def compute(keys: Any, first: Tensor, *rest: Any, **options: Any) -> Any:
        call = partial(kernel.call_boxed, keys)
        return (compute_in_fp32 if first.dtype == torch.bfloat16 else _unchanged)(call, first, *rest, **options)

    library.impl(name, compute, "CPU", with_keyset=True, allow_override=True)


def _unchanged(kernel: Callable[..., Any], *operands: Any, **options: Any) -> Any:
    return kernel(*operands, **options)


def _rounded(kernel: Callable[..., Any], *operands: Any, **options: Any) -> Tensor:
    found: Tensor = kernel(*map(_in_fp32, operands), **options)
    return found.bfloat16()


def _rounded_into(kernel: Callable[..., Any], *operands: Any, out: Tensor, **options: Any) -> Tensor:
    return out.copy_(kernel(*map(_in_fp32, operands), out=torch.empty_like(out, dtype=torch.float32), **options))


def _rounded_results(places: tuple[int, ...], kernel: Callable[..., Any], *operands: Any, **options: Any) -> Any:
    options = {key: _in_fp32(value) for key, value in options.items()}
    found = kernel(*map(_in_fp32, operands), **options)
    return tuple(value.bfloat16() if place in places else value for place, value in enumerate(found))


def _in_fp32(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype == torch.bfloat16 else value
