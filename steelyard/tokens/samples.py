"""Training samples by number: for the same files, split, seed and length, sample i is the same everywhere and for ever.

A batch is a range of sample numbers, so the only state a loader has is how many samples were consumed.
"""

from __future__ import annotations

from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from steelyard.core.errors import UserError
from steelyard.core.recipe import Recipe
from steelyard.core.recipe.data import split_shares
from steelyard.core.units import count
from steelyard.tokens import index_maps
from steelyard.tokens.blend import blend_order, normalised
from steelyard.tokens.indexed import IndexedTokens

Split = Literal["train", "valid", "test"]
SPLITS: tuple[Split, ...] = ("train", "valid", "test")
# A blend asks each dataset for a little more than its share, as Megatron does.
BLEND_MARGIN = 1.005


class Samples(Protocol):
    """Something that gives sample number i: sequence_length + 1 tokens."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int) -> npt.NDArray[np.int64]: ...


class DatasetSamples:
    """Samples of one pair of token files."""

    def __init__(self, tokens: IndexedTokens, maps: index_maps.IndexMaps) -> None:
        self.tokens, self.maps = tokens, maps

    def __len__(self) -> int:
        return len(self.maps)

    def __getitem__(self, number: int) -> npt.NDArray[np.int64]:
        shuffled = int(self.maps.shuffle_index[number])
        (first, start), (last, end) = self.maps.sample_index[shuffled : shuffled + 2].tolist()
        documents = self.maps.document_index
        if first == last:
            parts = [self.tokens.sequence(documents[first], start, end - start + 1)]
        else:
            between = [self.tokens.sequence(documents[position]) for position in range(first + 1, last)]
            head = self.tokens.sequence(documents[first], start)
            parts = [head, *between, self.tokens.sequence(documents[last], 0, end + 1)]
        return np.concatenate(parts).astype(np.int64, copy=False)


class BlendedSamples:
    """Samples of several datasets, each taken as often as its weight says."""

    def __init__(self, datasets: list[DatasetSamples], weights: list[float], samples: int) -> None:
        self.datasets = datasets
        self.dataset_index, self.sample_index = blend_order(weights, samples)

    def __len__(self) -> int:
        return len(self.dataset_index)

    def __getitem__(self, number: int) -> npt.NDArray[np.int64]:
        return self.datasets[int(self.dataset_index[number])][int(self.sample_index[number])]


def open_samples(recipe: Recipe, split: Split, samples: int) -> Samples:
    """The samples of one split of a recipe's data, at least `samples` of them."""
    sources = recipe.data.train
    if not sources:
        raise UserError(
            "names no token files to train on", where=recipe.where("data.train"), mend="set data.train to a prefix"
        )
    if len(sources) == 1:
        return _open_dataset(recipe, sources[0].prefix, split, samples)
    weights = normalised([source.weight for source in sources])
    datasets = [
        _open_dataset(recipe, source.prefix, split, int(np.ceil(np.ceil(samples * weight) * BLEND_MARGIN)))
        for source, weight in zip(sources, weights, strict=True)
    ]
    return BlendedSamples(datasets, weights, samples)


def batch(samples: Samples, first: int, count: int) -> npt.NDArray[np.int64]:
    """Samples `first` up to `first + count`, one per row."""
    return np.stack([samples[number] for number in range(first, first + count)])


def _open_dataset(recipe: Recipe, prefix: str, split: Split, samples: int) -> DatasetSamples:
    tokens = IndexedTokens(prefix)
    bounds = index_maps.split_bounds(split_shares(recipe.data.split), len(tokens))[SPLITS.index(split)]
    available = int(np.sum(tokens.lengths[bounds[0] : bounds[1]], dtype=np.int64))
    length = recipe.data.sequence_length
    if available <= length:
        raise UserError(
            f"the {split} share of {prefix} has {count(available)} tokens, too few for one sequence of {length}",
            where=recipe.where("data.split"),
            mend="use more text, shorter sequences or another split",
        )
    largest = int(tokens.sequence(bounds[0]).max())
    if largest >= recipe.model.vocab:
        raise UserError(
            f"{prefix} holds the id {largest}, but model.vocab is {recipe.model.vocab}",
            where=recipe.where("model.vocab"),
            mend="set it to the size of the tokenizer's vocabulary",
        )
    maps = index_maps.build(tokens.lengths, bounds, samples, length, recipe.train.seed)
    return DatasetSamples(tokens, maps)
