"""Counts the weights of a Hugging Face folder: their number, dtype, and zeros."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from steelyard.checkpoint.formats.safetensors import extents
from steelyard.core.console import console

# Embeddings and heads: they are not pruned, so they are not counted as matrices.
TABLES = ("embed", "wte", "wpe", "lm_head")


@dataclass(frozen=True)
class Weights:
    """Counts over all tensors, and over the matrices that may be pruned."""

    parameters: int
    dtype: str
    matrices: int
    """The number of matrices in the layers."""
    elements: int
    zeros: int
    """The elements of those matrices, and how many are zero."""
    two_of_four: int
    """Matrices in which every group of four neighbours of a row has at least two zeros."""

    @property
    def sparsity(self) -> float:
        """The fraction of zeros in the matrices of the layers."""
        return self.zeros / self.elements if self.elements else 0.0


def measure(folder: Path) -> Weights:
    """Read every tensor once and count its elements."""
    paths = sorted(folder.glob("*.safetensors"))
    dtypes: Counter[str] = Counter()
    matrices = elements = zeros = two_of_four = 0
    with console.progress("measuring", sum(path.stat().st_size for path in paths), "B") as progress:
        for name, extent in (pair for path in paths for pair in extents(path).items()):
            tensor = extent.read()
            dtypes[str(tensor.dtype).removeprefix("torch.")] += tensor.numel()
            if tensor.ndim == 2 and not any(table in name for table in TABLES):
                matrices += 1
                elements += tensor.numel()
                zeros += tensor.numel() - int(tensor.count_nonzero())
                two_of_four += _is_two_of_four(tensor)
            progress.advance(tensor.numel() * tensor.element_size())
    dtype = dtypes.most_common(1)[0][0] if dtypes else "none"
    return Weights(sum(dtypes.values()), dtype, matrices, elements, zeros, two_of_four)


def _is_two_of_four(matrix: Tensor) -> bool:
    """Along either dimension: Hugging Face's GPT-2 stores its matrices transposed."""
    return any(
        each.shape[1] % 4 == 0 and bool((each.unflatten(1, (-1, 4)).count_nonzero(2) <= 2).all())
        for each in (matrix, matrix.t())
    )
