"""Training samples by number: for the same files, split, seed and length, sample i is always the same."""

from __future__ import annotations

import glob
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from steelyard.core.errors import UserError
from steelyard.core.recipe import Recipe
from steelyard.core.recipe.data_section import DataSource, split_shares
from steelyard.core.units import count
from steelyard.tokens import index_cache, index_maps
from steelyard.tokens.blend import Order, blend_order, normalised
from steelyard.tokens.indexed_dataset import IndexedTokens, idx_path

Split = Literal["train", "valid", "test"]
SPLITS: tuple[Split, ...] = ("train", "valid", "test")
# Each dataset of a blend provides a little more than its share, as in Megatron.
BLEND_MARGIN = 1.005


class Samples(Protocol):
    """A sequence of samples. Sample i is sequence_length + 1 tokens, or fields of `model.Batch` by name."""

    @property
    def counts(self) -> npt.NDArray[np.int64] | None:
        """The number of predictions of each sample that count in the loss; None if all do."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int) -> npt.NDArray[np.int64] | dict[str, npt.NDArray[Any]]: ...


class StreamSamples:
    """Samples from the stream of the documents of one dataset, as given by its index maps."""

    counts = None

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


class FixedSamples:
    """Samples that are whole documents of the same length, in a new order in each epoch."""

    counts = None

    def __init__(self, tokens: IndexedTokens, bounds: tuple[int, int], samples: int, seed: int) -> None:
        random = np.random.RandomState(seed)
        epochs = math.ceil(samples / (bounds[1] - bounds[0]))
        self.tokens = tokens
        self.order = np.concatenate([bounds[0] + random.permutation(bounds[1] - bounds[0]) for _ in range(epochs)])

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, number: int) -> npt.NDArray[np.int64]:
        return self.tokens.sequence(int(self.order[number])).astype(np.int64)


class BlendedSamples:
    """Samples of several datasets, mixed by weight."""

    counts = None

    def __init__(self, datasets: Sequence[TokenSamples], weights: list[float], samples: int, order: Order) -> None:
        self.datasets = datasets
        self.dataset_index, self.sample_index = blend_order(weights, samples, order)

    def __len__(self) -> int:
        return len(self.dataset_index)

    def __getitem__(self, number: int) -> npt.NDArray[np.int64]:
        return self.datasets[int(self.dataset_index[number])][int(self.sample_index[number])]


TokenSamples = StreamSamples | FixedSamples | BlendedSamples


def open_samples(recipe: Recipe, split: Split, samples: int) -> TokenSamples:
    """The samples of one split of a recipe's data, at least `samples` of them."""
    named, key, _ = sources_of(recipe, split)
    sources = expand_sources(named, recipe, key)

    def opened(prefix: str, wanted: int) -> TokenSamples:
        tokens, bounds = _opened(recipe, split, prefix)
        if recipe.data.fixed_length:
            return FixedSamples(tokens, bounds, wanted, recipe.train.seed)
        request = index_cache.IndexRequest(
            prefix, wanted, split, recipe.train.seed, recipe.data.sequence_length, recipe.data.split
        )
        maps = index_cache.index_maps_for(
            request, tokens.lengths, bounds, recipe.data.index_cache, recipe.data.index_names
        )
        return StreamSamples(tokens, maps)

    return _blended(opened, sources, samples, recipe.data.blend_order)


def sources_of(recipe: Recipe, split: Split) -> tuple[list[DataSource], str, tuple[float, float]]:
    """The sources of a split, their recipe key, and the range of the documents that belongs to the split."""
    own = {"train": [], "valid": recipe.data.valid, "test": recipe.data.test}[split]
    if own:
        return own, f"data.{split}", (0.0, 1.0)
    return recipe.data.train, "data.train", _share(recipe.data.split, split)


def check_files(recipe: Recipe, split: Split, sources: list[DataSource]) -> None:
    """Raise if `open_samples` would reject the token files, without creating samples."""
    for source in expand_sources(sources, recipe, sources_of(recipe, split)[1]):
        _opened(recipe, split, source.prefix)


def _opened(recipe: Recipe, split: Split, prefix: str) -> tuple[IndexedTokens, tuple[int, int]]:
    """A pair of token files, checked for training, and the range of its documents that belongs to the split."""
    tokens, (_, key, share) = IndexedTokens(prefix), sources_of(recipe, split)
    bounds = round(share[0] * len(tokens)), round(share[1] * len(tokens))
    _check_tokens(recipe, tokens, bounds, split, key)
    return tokens, bounds


def _blended(
    opened: Callable[[str, int], TokenSamples], sources: list[DataSource], samples: int, order: Order
) -> TokenSamples:
    if len(sources) == 1:
        return opened(sources[0].prefix, samples)
    # Like Megatron, normalize twice and round up the part of each dataset, to get the same order.
    weights = normalised([source.weight for source in sources])
    parts = [math.ceil(samples * weight) for weight in weights]
    datasets = [
        opened(source.prefix, math.ceil(part * BLEND_MARGIN)) for source, part in zip(sources, parts, strict=True)
    ]
    return BlendedSamples(datasets, normalised(weights), sum(parts), order)


def expand_sources(sources: list[DataSource], recipe: Recipe, key: str) -> list[DataSource]:
    """The sources, with folders and patterns expanded to prefixes, which share the weight equally."""
    if not sources:
        raise UserError("there are no token files to train on", where=recipe.where(key), hint=f"set {key} to a prefix")
    expanded: list[DataSource] = []
    for source in sources:
        pattern = source.prefix
        if idx_path(pattern).is_file():
            expanded.append(source)
            continue
        if Path(pattern).is_dir():
            pattern = f"{glob.escape(pattern)}/*"
        matches = sorted(match.removesuffix(".idx") for match in glob.glob(f"{pattern.removesuffix('.idx')}.idx"))
        if not matches:
            raise UserError(
                f"there is no token file {idx_path(source.prefix)}",
                where=recipe.where(key),
                hint="steelyard data tokenize writes a pair; pass its prefix, a folder of pairs, or a pattern",
            )
        expanded += [_one_of(source, match, len(matches)) for match in matches]
    return expanded


def _one_of(source: DataSource, prefix: str, of: int) -> DataSource:
    return source.model_copy(update={"prefix": prefix, "weight": source.weight / of})


def _share(split: str, name: Split) -> tuple[float, float]:
    ends = [0.0, *np.cumsum(split_shares(split)).tolist()]
    number = SPLITS.index(name)
    return ends[number], ends[number + 1]


def _check_tokens(recipe: Recipe, tokens: IndexedTokens, bounds: tuple[int, int], split: Split, key: str) -> None:
    """Raise if the tokens cannot be used for training."""
    length = recipe.data.sequence_length
    lengths = tokens.lengths[bounds[0] : bounds[1]]
    available = int(np.sum(lengths, dtype=np.int64))
    if available <= length:
        raise UserError(
            f"the {split} share of {tokens.prefix} has {count(available)} tokens, too few for one sequence of {length}",
            where=recipe.where("data.split"),
            hint="use more text, shorter sequences or another split",
        )
    if recipe.data.fixed_length and (lengths != length + 1).any():
        odd = int(lengths[lengths != length + 1][0])
        raise UserError(
            f"{tokens.prefix} has a document of {odd} tokens, but fixed-length samples need {length + 1} each",
            where=recipe.where("data.fixed_length"),
            hint=f"steelyard data tokenize --fixed-length {length} writes such files",
        )
    largest = tokens.largest(*bounds)
    if largest >= recipe.model.vocab:
        raise UserError(
            f"{tokens.prefix} contains the id {largest}, but model.vocab is {recipe.model.vocab}",
            where=recipe.where("model.vocab"),
            hint="set it to the size of the tokenizer's vocabulary",
        )
