"""Checkpoints whose matrices come out pruned: any source, seen through masks or through pruning itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from steelyard.checkpoint.formats import CheckpointSource, open_source
from steelyard.checkpoint.formats.huggingface import tokenizer_files, tokenizer_in
from steelyard.core.console import console
from steelyard.core.errors import UserError
from steelyard.sparsity import frozen_base
from steelyard.sparsity.layerwise import LayerOnDevice
from steelyard.sparsity.mask_file import MaskFile
from steelyard.sparsity.mask_sources import Carried, Masks, carried
from steelyard.text.tokenizer import Tokenizer

DENSE = "none"  # What `--mask` is called where a model is to be seen without its masks.


class SourceView(CheckpointSource):
    """Another source, unchanged."""

    def __init__(self, source: CheckpointSource) -> None:
        self.source = source
        self.format, self.path, self.config, self.dtype = source.format, source.path, source.config, source.dtype
        self.step, self.layout, self.extra = source.step, source.layout, source.extra
        self.tokenizer, self.tokenizer_files = source.tokenizer, source.tokenizer_files

    def names(self) -> list[str]:
        """As the other's."""
        return self.source.names()

    def sizes(self) -> dict[str, tuple[int, ...]]:
        """As the other's."""
        return self.source.sizes()

    def tensor(self, name: str) -> Tensor:
        """As the other's."""
        return self.source.tensor(name)

    def load_tokenizer(self) -> Tokenizer:
        """As the other's, which may lie where no tokenizer is looked for: in a GGUF. Or another that was set."""
        is_set = self.tokenizer is not None and self.tokenizer != self.source.tokenizer
        return super().load_tokenizer() if is_set else self.source.load_tokenizer()


class MaskedSource(SourceView):
    """A source of which only the weights that masks keep are left."""

    def __init__(self, source: CheckpointSource, masks: Masks) -> None:
        super().__init__(source)
        self.masks, self._masked = masks, frozenset(masks.names())
        sizes = source.sizes()
        for name in masks.names():
            if sizes.get(name) != masks.shape(name):
                raise UserError(
                    f"{name} is {masks.shape(name)} in the masks and {sizes.get(name, 'not there')} in {source.path}",
                    where=str(masks.path),
                    hint="use the masks with the checkpoint that they were made for",
                )

    def tensor(self, name: str) -> Tensor:
        """The other's, with zeros where the mask has them."""
        whole = super().tensor(name)
        return whole.masked_fill(~self.masks.mask(name), 0) if name in self._masked else whole


class BeingPruned(SourceView):
    """A source whose layers are pruned as they are asked for, in their order: one is held at a time."""

    def __init__(self, source: CheckpointSource, layers: Iterator[LayerOnDevice], names: list[str]) -> None:
        super().__init__(source)
        self.layers, self.wanted = layers, frozenset(names)
        self.current: LayerOnDevice | None = None

    def tensor(self, name: str) -> Tensor:
        """The other's, or what pruning made of it."""
        if name not in self.wanted:
            return super().tensor(name)
        while self.current is None or name not in self.current.matrices:
            assert self.current is None or self.current.number < int(name.split(".")[1]), f"{name} comes too late"
            self.current = next(self.layers)
        return self.current.matrices[name].weight_OI


def masked(source: CheckpointSource, mask: str | Path, checks: bool = True) -> CheckpointSource:
    """A checkpoint seen through a mask file that was made for it."""
    masks = MaskFile(mask)
    seen = MaskedSource(source, masks)
    if checks:
        frozen_base.check(masks.base, source, "use the masks with the checkpoint that they were made for")
    return seen


def through(brought: Carried) -> CheckpointSource:
    """Weights seen through the masks that something brings for them."""
    seen = MaskedSource(brought.base, brought.masks)
    seen.path, seen.step = brought.masks.path, brought.step
    if brought.tokenizer != brought.base.tokenizer:  # A run may have learned with one of its own.
        seen.tokenizer = brought.tokenizer
        folder = Path(brought.tokenizer or "")
        seen.tokenizer_files = tokenizer_files(folder) if tokenizer_in(folder) else []
    return seen


def opened(
    path: str | Path, mask: str | None = None, moved_to: str | None = None, checks: bool = True
) -> CheckpointSource:
    """A checkpoint of any kind, seen through a mask file, through the masks it brings itself, or dense (`none`).

    Where masks were learned, the weights are those of the base, which may have `moved_to` another place. That weights
    are those that masks belong to is found out by reading all of them: of many ranks one `checks`.
    """
    brought = carried(path, moved_to, checks)
    source = open_source(path) if brought is None else brought.base
    if mask == DENSE:
        return source
    if mask is not None:
        return masked(source, mask, checks)
    if brought is None:
        return source
    console.say(f"{path} brings {brought.how}, which are applied")
    return through(brought)
