"""Sums of x x^T over the inputs of matrices, collected while a layer runs on calibration windows.

Matrices with the same input (query, key and value; gate and up) share one sum. Every expert is a matrix of its own,
named `layers.0.mlp.experts.up.weight[3]`: its inputs are the tokens that the router sends to it. The sums are fp64:
fp32 products of batches add up exactly there, unless they differ by more than 2^24 in size, so the order of the batches
does not matter.

Tensor suffixes: S slots (a token with one of its experts), X experts, O outputs, I inputs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from steelyard.checkpoint.formats import CheckpointSource
from steelyard.model.experts import ExpertLinear
from steelyard.parallel.mesh import Mesh
from steelyard.sparsity import prune_ranks
from steelyard.sparsity.one_shot import Hessian, Pruned

EXPERT = re.compile(r"(.*)\[(\d+)\]")


def matrices_of(name: str, size: tuple[int, ...]) -> list[str]:
    """The matrices of a parameter: itself, or those of its experts."""
    return [name] if len(size) == 2 else [f"{name}[{expert}]" for expert in range(size[0])]


def parameter_of(matrix: str) -> tuple[str, int | None]:
    """The parameter that contains a matrix, and the expert."""
    found = EXPERT.fullmatch(matrix)
    return (matrix, None) if found is None else (found[1], int(found[2]))


class MatrixReader:
    """Reads matrices of one layer; the parameter of all experts is read once."""

    def __init__(self, source: CheckpointSource) -> None:
        self.source = source
        self._stacks: dict[str, Tensor] = {}

    def __call__(self, matrix: str) -> Tensor:
        """A matrix, [out, in]."""
        name, expert = parameter_of(matrix)
        if expert is None:
            return self.source.tensor(name)
        if name not in self._stacks:
            self._stacks[name] = self.source.tensor(name)
        return self._stacks[name][expert]


def stacked(pruned: dict[str, Pruned], names: Iterable[str]) -> dict[str, Pruned]:
    """Pruned parameters from their pruned matrices."""
    parts: dict[str, list[Pruned]] = {}
    for matrix in sorted(pruned, key=lambda matrix: parameter_of(matrix)[1] or 0):
        parts.setdefault(parameter_of(matrix)[0], []).append(pruned[matrix])
    return {name: pruned[name] if name in pruned else _stack(parts[name]) for name in names}


def _stack(experts: list[Pruned]) -> Pruned:
    masks, weights = ([getattr(each, name) for each in experts] for name in ("mask_OI", "weight_OI"))
    return Pruned(torch.stack(masks), torch.stack(weights))


class Gram:
    """The sum of x x^T over all tokens seen: fp32 products of batches, added in fp64."""

    def __init__(self, inputs: int, device: torch.device) -> None:
        self.sum_II = torch.zeros(inputs, inputs, device=device, dtype=torch.float64)
        self.tokens = 0

    def add(self, x: Tensor) -> None:
        """Add inputs, whose last dimension is the channels."""
        rows = x.flatten(0, -2)
        self.tokens += len(rows)
        if rows.dtype == torch.float32 or rows.device.type != "cuda":
            rows = rows.float()
            self.sum_II += torch.mm(rows.t(), rows)
        else:  # Products of bf16 numbers are exact in fp32, and accumulate in fp32.
            self.sum_II += torch.mm(rows.t(), rows, out_dtype=torch.float32)

    @cached_property
    def hessian(self) -> Hessian:
        """(2/n) sum x x^T in fp32, after all tokens; the sum is freed."""
        matrix_II = self.sum_II.mul_(2 / self.tokens).float()
        del self.sum_II
        return Hessian(matrix_II)


@dataclass
class InputGroup:
    """Matrices with the same input, in the order in which they are used, and the sum of that input.

    The sum is None on ranks that do not have it, and without calibration.
    """

    number: int
    names: list[str]
    gram: Gram | None = None
    is_calibrated: bool = False


class InputWatcher:
    """Groups matrices by their input, and sums the inputs, while modules compute."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.groups: list[InputGroup] = []
        self._of_parameter: dict[str, list[InputGroup]] = {}
        self._last: tuple[Tensor, str] | None = None

    def watch(self, name: str, module: nn.Module) -> Any:
        """Sum the inputs of a parameter from now on; returns the handle that ends it."""

        def see(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            self._see(name, module, *inputs)

        return module.register_forward_pre_hook(see)

    def _see(self, name: str, module: nn.Module, x: Tensor, counts_X: Tensor | None = None) -> None:
        assert isinstance(module.weight, Tensor)
        size = tuple(module.weight.shape)
        if self._last is not None and self._last[0] is x:
            for group, matrix in zip(self._of_parameter[self._last[1]], matrices_of(name, size), strict=True):
                group.names += [matrix] if matrix not in group.names else []
            return
        self._last = x, name
        if name not in self._of_parameter:
            self._of_parameter[name] = [self._group(matrix, size[-1], x.device) for matrix in matrices_of(name, size)]
        rows = [x]
        if isinstance(module, ExpertLinear):
            assert counts_X is not None
            rows = list(x[: int(counts_X.sum())].split(counts_X.tolist()))
        for group, each in zip(self._of_parameter[name], rows, strict=True):
            if group.gram is not None and len(each):
                group.gram.add(each)

    def _group(self, matrix: str, inputs: int, device: torch.device) -> InputGroup:
        group = InputGroup(len(self.groups), [matrix], is_calibrated=True)
        if prune_ranks.has_group(self.mesh, group.number):
            group.gram = Gram(inputs, device)
        self.groups.append(group)
        return group

    def finished(self) -> list[InputGroup]:
        """All groups, with the sums over the windows of all ranks."""
        for group in self.groups:
            if group.gram is not None:
                group.gram.tokens = prune_ranks.sum_over_data(self.mesh, group.gram.sum_II, group.gram.tokens)
        return self.groups
