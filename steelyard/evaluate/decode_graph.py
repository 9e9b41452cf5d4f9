"""Decodes one token of each row at a time with constant shapes, on a GPU as the replay of a CUDA graph.

Attention reads a `span` of the KV cache, a power of two, and masks what lies beyond the token. There is one graph for
each span. The first replay of a graph is compared with the same operations without it: if they differ, or if they
cannot be captured, generation continues without graphs and prints a warning.

Tensor suffixes: B batch, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from steelyard.core.console import console
from steelyard.model import Batch, Cache, LanguageModel, Slot
from steelyard.sparsity import sparse_linear

SHORTEST_SPAN = 256
WARM_UP = 2  # calls that compile kernels and select the fastest ones
TOLERANCE = 1e-2  # of the largest logit; a graph runs the same kernels


class Decoder:
    """The decode step of a model with a cache that holds the prompt."""

    def __init__(self, network: LanguageModel, cache: Cache, rows: int = 1) -> None:
        self.network, self.cache = network, cache
        device = next(network.parameters()).device
        self.tokens_B1 = torch.zeros(rows, 1, dtype=torch.long, device=device)
        self.position_1 = torch.zeros(1, dtype=torch.long, device=device)
        self.uses_graphs = device.type == "cuda"
        self._address = 0
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}

    @torch.inference_mode()
    def logits(self, tokens: Tensor | int) -> Tensor:
        """The logits (B, V) after a further token of each row. They are overwritten by the next call."""
        position = self.cache.length
        self.cache.grow()
        self.tokens_B1.copy_(tokens) if isinstance(tokens, Tensor) else self.tokens_B1.fill_(tokens)
        self.position_1.fill_(position)
        logits_BV = self._replayed(span_of(position + 1, self.cache.allocated))
        self.cache.forget(position + 1)
        return logits_BV

    def step(self, span: int) -> Tensor:
        """The operations of a step, with the tokens and the position in their tensors."""
        self.cache.slot = Slot(self.position_1, span)
        try:
            logits: Tensor = self.network(Batch(self.tokens_B1, logits_to_keep=1), cache=self.cache)
        finally:
            self.cache.slot = None
        return logits[:, -1]

    def _replayed(self, span: int) -> Tensor:
        if not self.uses_graphs:
            return self.step(span)
        if self._address != self.cache.address:  # Graphs of memory that is no longer the cache's.
            self._graphs, self._address = {}, self.cache.address
        if span not in self._graphs:
            return self._captured(span)
        graph, logits_BV = self._graphs[span]
        graph.replay()
        return logits_BV

    def _captured(self, span: int) -> Tensor:
        """Capture a graph. Returns the logits of this step."""
        with sparse_linear.for_graphs():
            for _ in range(WARM_UP):
                expected_BV = self.step(span)
            torch.cuda.synchronize()
            graph, others = torch.cuda.CUDAGraph(), list(self._graphs.values())
            try:
                with torch.cuda.graph(graph, pool=others[0][0].pool() if others else None):
                    logits_BV = self.step(span)
            except RuntimeError as error:
                return self._without_graphs(str(error).splitlines()[0], expected_BV)
        graph.replay()
        apart = (logits_BV - expected_BV).abs().max() / expected_BV.abs().max()
        if not bool(apart <= TOLERANCE):
            return self._without_graphs("its graph gives other logits", expected_BV)
        self._graphs[span] = graph, logits_BV
        return expected_BV

    def _without_graphs(self, reason: str, logits_BV: Tensor) -> Tensor:
        console.warn(f"this model is decoded without CUDA graphs, which is slower: {reason}")
        self.uses_graphs, self._graphs = False, {}
        return logits_BV


def span_of(length: int, allocated: int) -> int:
    """How many positions of the cache a step reads: the next power of two."""
    return min(max(SHORTEST_SPAN, 1 << (length - 1).bit_length()), allocated)
