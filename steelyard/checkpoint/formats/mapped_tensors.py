"""A checkpoint source whose files have the tensor names of another format."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from steelyard.checkpoint.finite import refuse_nonfinite
from steelyard.checkpoint.formats.key_mapping import Entry, ours_sizes, taken_apart, theirs_size
from steelyard.checkpoint.formats.source import DTYPES, TABLES, CheckpointSource, StoredTensor, padded
from steelyard.core.errors import CorruptFileError, UserError
from steelyard.core.recipe.model_section import ModelConfig


class Store(ABC):
    """Tensors by their names in another format."""

    @abstractmethod
    def sizes(self) -> dict[str, tuple[int, ...]]:
        """The size of each whole tensor."""

    @abstractmethod
    def dtypes(self) -> set[torch.dtype]:
        """The dtypes that occur."""

    @abstractmethod
    def read(self, entry: Entry) -> Tensor:
        """A whole tensor."""


class MappedSource(CheckpointSource):
    """A store, and the entries that map its tensors to ours."""

    def __init__(
        self, format_: str, path: Path, config: ModelConfig, store: Store, entries: list[Entry],
        layout: dict[str, Any],
    ) -> None:  # fmt: skip
        self.format, self.path, self.config, self.layout = format_, path, config, layout
        self.store, self.entries = store, entries
        self.dtype = widest(store.dtypes(), path)
        self.hf_metadata, self.tokenizer_files = {}, []
        self._entries_of: dict[str, list[Entry]] = {}
        for entry in entries:
            for name in entry.ours:
                self._entries_of.setdefault(name, []).append(entry)
        self._last: tuple[Entry, list[Tensor]] | None = None

    def names(self) -> list[str]:
        return list(self._entries_of)

    def sizes(self) -> dict[str, tuple[int, ...]]:
        found = dict(self.store.sizes())
        sizes: dict[str, tuple[int, ...]] = {}
        experts: dict[str, list[tuple[int, ...]]] = {}
        for entry in self.entries:
            if entry.name in found:
                ours = zip(entry.ours, ours_sizes(entry, found.pop(entry.name), self.config), strict=True)
                if entry.expert is None:
                    sizes.update(ours)
                else:
                    for name, size in ours:
                        experts.setdefault(name, []).append(size)
        for name, each in experts.items():
            if len(each) == len(self._entries_of[name]) and len(set(each)) == 1:
                sizes[name] = (len(each), *each[0])
        return sizes | found

    def in_files(self, name: str, expected: dict[str, tuple[int, ...]]) -> StoredTensor:
        if name not in self._entries_of:
            return super().in_files(name, expected)
        found = self.store.sizes()
        stored = [
            StoredTensor(entry.name, found.get(entry.name), theirs_size(entry, expected))
            for entry in self._entries_of[name]
        ]
        return next((each for each in stored if each.found != each.wanted), stored[0])

    def tensor(self, name: str) -> Tensor:
        first, *_ = entries = self._entries_of[name]
        if first.expert is not None:
            return torch.stack([self._read(entry)[entry.ours.index(name)] for entry in entries])
        # Cache the last entry: callers read its tensors one after the other.
        if self._last is None or self._last[0] is not first:
            self._last = None
            parts = self._read(first)
            if len(parts) == 1:
                return padded(parts[0], self.config) if name in TABLES else parts[0]
            self._last = first, parts
        return self._last[1][first.ours.index(name)]

    def _read(self, entry: Entry) -> list[Tensor]:
        """Our tensors in one of theirs."""
        try:
            whole = self.store.read(entry)
        except KeyError:
            raise CorruptFileError(f"{entry.name} is missing", where=str(self.path)) from None
        ours = "" if entry.ours == (entry.name,) else f" (here {', '.join(entry.ours)})"
        refuse_nonfinite({entry.name + ours: whole}, self.path)
        return taken_apart(entry, whole, self.config)


def widest(dtypes: set[torch.dtype], path: Path) -> torch.dtype:
    """The narrowest dtype that holds all of these exactly."""
    unsupported = sorted(str(dtype).removeprefix("torch.") for dtype in dtypes if dtype not in DTYPES)
    if unsupported:
        raise UserError(
            f"{path} has tensors of the dtype {', '.join(unsupported)}", hint="supported are fp64, fp32, fp16 and bf16"
        )
    if not dtypes:
        raise UserError(f"{path} has no tensors")
    ordered = sorted(dtypes, key=str)
    dtype = ordered[0]
    for other in ordered[1:]:
        dtype = torch.promote_types(dtype, other)
    return dtype
