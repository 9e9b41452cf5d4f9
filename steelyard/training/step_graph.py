"""The passes of a micro-batch as a CUDA graph (`train.cuda_graph`).

A step of a small model waits for the host, which launches thousands of kernels one by one. A graph launches them at
once. It is captured after a few ordinary micro-batches, when all layers are compiled, and then replayed: the rows are
copied into fixed buffers, and gradients appear in fixed tensors. The first micro-batch of a step writes its gradients,
later ones add to them, so there are two graphs. Rows of another size have graphs of their own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from steelyard.core.errors import UserError
from steelyard.model import Batch

WARM_UP = 3
"""Micro-batches of a size before the capture."""
MOST_SIZES = 4
"""Sizes of rows that are captured. A graph holds the memory of its activations."""

Passes = Callable[[Batch, Tensor], Tensor]
"""Forward and backward pass of a micro-batch with a factor on its loss; returns the loss."""


class CapturedGraph(NamedTuple):
    """A graph with its inputs and outputs."""

    graph: torch.cuda.CUDAGraph
    batch: Batch
    loss: Tensor
    gradients: list[Tensor | None]


class StepGraph:
    """Runs passes, and replays them once they are captured."""

    def __init__(self, passes: Passes, parameters: list[nn.Parameter], device: torch.device) -> None:
        self.passes, self.parameters = passes, [each for each in parameters if each.requires_grad]
        self.factor = torch.ones((), device=device)
        self._captured: dict[tuple[bool, Hashable], CapturedGraph] = {}
        self._seen: Counter[Hashable] = Counter()
        self._pool: Any = None

    def __call__(self, batch: Batch, factor: Tensor) -> Tensor:
        """The loss of a micro-batch. Its gradients are added to those of the parameters."""
        if batch.document_starts_BN is not None:
            raise UserError(
                "train.cuda_graph does not support attention within packed documents, whose kernels depend on the rows",
                hint="set train.cuda_graph = false, or data.mask_documents = false",
            )
        adds = any(parameter.grad is not None for parameter in self.parameters)
        size = tuple((name, tuple(tensor.shape)) for name, tensor in batch.tensors().items())
        key = adds, size
        if key not in self._captured:
            sizes = {captured for _, captured in self._captured} | {size}
            if self._seen[key] < WARM_UP or len(sizes) > MOST_SIZES:
                self._seen[key] += 1
                return self.passes(batch, factor)
            self._captured[key] = self._capture(batch)
        captured = self._captured[key]
        for name, tensor in batch.tensors().items():
            captured.batch.tensors()[name].copy_(tensor, non_blocking=True)
        self.factor.copy_(factor)
        for parameter, gradient in zip(self.parameters, captured.gradients, strict=True):
            if adds and gradient is not None and parameter.grad is not gradient:
                gradient.copy_(parameter.grad) if parameter.grad is not None else gradient.zero_()
            parameter.grad = gradient
        captured.graph.replay()
        return captured.loss.clone()

    def _capture(self, batch: Batch) -> CapturedGraph:
        before = [parameter.grad for parameter in self.parameters]
        fixed = batch.replace(**{name: tensor.clone() for name, tensor in batch.tensors().items()})
        graph = torch.cuda.CUDAGraph()
        torch.cuda.empty_cache()
        try:
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                loss = self.passes(fixed, self.factor)
        except RuntimeError as error:
            raise UserError(
                f"the passes cannot be captured as a CUDA graph: {str(error).splitlines()[0]}",
                hint="set train.cuda_graph = false",
            ) from error
        self._pool = graph.pool()
        captured = CapturedGraph(graph, fixed, loss, [parameter.grad for parameter in self.parameters])
        for parameter, gradient in zip(self.parameters, before, strict=True):
            parameter.grad = gradient
        return captured
