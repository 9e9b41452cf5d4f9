"""Lets zero bubble split the backward pass of a `torch.autograd.Function` that takes a weight.

Zero bubble computes the gradients of inputs first and those of weights later, from the nodes of the graph where weights
and inputs meet. torch asks such a node for the metadata of its outputs, and before 2.13 a node of a Function written in
Python refuses to answer. So the Function answers itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

Function = TypeVar("Function", bound=type[torch.autograd.Function])


class OutputMetadata(NamedTuple):
    """What torch reads of a node's output."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    is_nested_tensor: bool = False
    is_cpp_nested_tensor: bool = False


def splittable(output: Callable[..., tuple[int, ...]]) -> Callable[[Function], Function]:
    """Declare the shape of a Function's only output, as a function of the tensors it saves for its backward."""

    def metadata(node: Any) -> list[OutputMetadata]:
        saved: list[Tensor | None] = node.saved_tensors
        known = next(tensor for tensor in saved if tensor is not None)
        return [OutputMetadata(output(*saved), known.dtype, known.device)]

    def declare(function: Function) -> Function:
        function._backward_cls._input_metadata = property(metadata)  # type: ignore[attr-defined]
        return function

    return declare
