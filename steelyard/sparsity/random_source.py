"""A model of a known config with random 2:4 weights, to measure its speed without a checkpoint."""

from __future__ import annotations

import itertools
import zlib
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from steelyard.checkpoint.formats import CheckpointSource
from steelyard.checkpoint.formats.compressed_tensors import GROUP, NONZEROS, PARTS, WEIGHT, matrices
from steelyard.checkpoint.formats.row_scales import ValueFormat
from steelyard.checkpoint.formats.source import expected_sizes
from steelyard.core.recipe import load_recipe
from steelyard.sparsity.semi_structured import CompressedView, compressed_parts

STD = 0.02
DISTINCT_ROWS = 1024  # of a matrix; more would take longer and change no time
PAIRS = list(itertools.combinations(range(GROUP), NONZEROS))  # the positions of nonzero weights in a group


class RandomSource(CheckpointSource):
    """Weights of a recipe's model. Layers share their values and rows repeat, so large models are ready quickly."""

    format = "random"

    def __init__(self, recipe: str) -> None:
        self.path, self.config, self.dtype = Path(recipe), load_recipe(recipe).model, torch.bfloat16
        self.layout, self.hf_metadata, self.tokenizer_files = {}, {}, []
        self._sizes = expected_sizes(self.config)
        self.pruned = matrices(self._sizes)

    def names(self) -> list[str]:
        """All tensors of the model."""
        return list(self._sizes)

    def sizes(self) -> dict[str, tuple[int, ...]]:
        """Their sizes."""
        return self._sizes

    def tensor(self, name: str) -> Tensor:
        """Random values, 2:4 in the matrices of layers, and ones in norms."""
        size = self._sizes[name]
        if len(size) == 1:
            return torch.full(size, 1.0 if name.endswith(WEIGHT) else 0.0)
        return _random(_kind(name), size, name in self.pruned)


class RandomCompressed(CompressedView):
    """The same with compressed matrices."""

    def __init__(self, recipe: str, value_format: ValueFormat | None = None) -> None:
        source = RandomSource(recipe)
        super().__init__(source, source.pruned, value_format)

    def tensor(self, name: str) -> Tensor:
        """A tensor of the source, or the values, indices or scales of one of its matrices."""
        if not name.endswith(PARTS):
            return super().tensor(name)
        stem, _, part = name.rpartition(".")
        size = self.sizes()[stem + WEIGHT]
        return _compressed(_kind(stem + WEIGHT), size, self.value_format)["." + part]


def _kind(name: str) -> str:
    """The name of a tensor without the number of its layer."""
    return name.split(".", 2)[-1] if name.startswith("layers.") else name


@lru_cache(maxsize=16)
def _random(kind: str, size: tuple[int, ...], pruned: bool) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(kind.encode()))
    rows = torch.empty(min(size[0], DISTINCT_ROWS), *size[1:]).normal_(0.0, STD, generator=generator)
    if pruned:
        kept = torch.tensor([[place in pair for place in range(GROUP)] for pair in PAIRS])
        chosen = torch.randint(len(PAIRS), (*rows.shape[:-1], size[-1] // GROUP), generator=generator)
        rows *= kept[chosen].flatten(-2)
    return rows.bfloat16().repeat(-(-size[0] // len(rows)), *[1] * (len(size) - 1))[: size[0]]


@lru_cache(maxsize=16)
def _compressed(kind: str, size: tuple[int, ...], value_format: ValueFormat | None) -> dict[str, Tensor]:
    return compressed_parts(_random(kind, size, True), value_format)
