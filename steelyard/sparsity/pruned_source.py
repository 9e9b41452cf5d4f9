"""Views of checkpoints with pruned matrices: any source with masks applied, or pruned while it is read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from steelyard.checkpoint.formats import CheckpointSource, SourceView, open_source
from steelyard.checkpoint.formats.huggingface import tokenizer_files, tokenizer_in
from steelyard.core.console import console
from steelyard.core.errors import UserError
from steelyard.sparsity import frozen_base
from steelyard.sparsity.layerwise import LayerOnDevice
from steelyard.sparsity.mask_file import MaskFile
from steelyard.sparsity.mask_sources import MaskedCheckpoint, Masks, masked_checkpoint

DENSE = "none"  # The value of `--mask` that leaves out a model's masks.


class MaskedSource(SourceView):
    """A source with masks applied."""

    def __init__(self, source: CheckpointSource, masks: Masks) -> None:
        super().__init__(source)
        self.masks, self._masked = masks, frozenset(masks.names())
        sizes = source.sizes()
        for name in masks.names():
            if sizes.get(name) != masks.shape(name):
                raise UserError(
                    f"{name} is {masks.shape(name)} in the masks, but {sizes.get(name, 'missing')} in {source.path}",
                    where=str(masks.path),
                    hint="use the masks with the checkpoint that they were made for",
                )

    def tensor(self, name: str) -> Tensor:
        """The tensor, with its mask applied if it has one."""
        whole = super().tensor(name)
        return whole.masked_fill(~self.masks.mask(name), 0) if name in self._masked else whole


class PartlyPrunedSource(SourceView):
    """A source whose layers are pruned when they are read, in order; only one is in memory at a time."""

    def __init__(self, source: CheckpointSource, layers: Iterator[LayerOnDevice], names: list[str]) -> None:
        super().__init__(source)
        self.layers, self.wanted = layers, frozenset(names)
        self.current: LayerOnDevice | None = None

    def tensor(self, name: str) -> Tensor:
        """The tensor, pruned if it is one of the chosen matrices."""
        if name not in self.wanted:
            return super().tensor(name)
        while self.current is None or name not in self.current.matrices:
            assert self.current is None or self.current.number < int(name.split(".")[1]), f"{name} is read out of order"
            self.current = next(self.layers)
        return self.current.matrices[name].weight_OI


def masked(source: CheckpointSource, mask: str | Path, checks: bool = True) -> CheckpointSource:
    """A checkpoint with a mask file applied, which must be made for it."""
    masks = MaskFile(mask)
    view = MaskedSource(source, masks)
    if checks:
        frozen_base.check(masks.base, source, "use the masks with the checkpoint that they were made for")
    return view


def through(attached: MaskedCheckpoint) -> CheckpointSource:
    """The weights of a run or checkpoint with its masks applied."""
    view = MaskedSource(attached.base, attached.masks)
    view.path, view.step = attached.masks.path, attached.step
    if attached.tokenizer != attached.base.tokenizer:  # A run may use its own tokenizer.
        view.tokenizer = attached.tokenizer
        folder = Path(attached.tokenizer or "")
        view.tokenizer_files = tokenizer_files(folder) if tokenizer_in(folder) else []
    return view


def opened(
    path: str | Path, mask: str | None = None, moved_to: str | None = None, checks: bool = True
) -> CheckpointSource:
    """A checkpoint of any kind with a mask file applied, with its own masks, or dense (`none`).

    For learned masks the weights are those of the base, which may have `moved_to` another path. `checks` verifies that
    the masks belong to the weights, which reads all of them: with many ranks only one needs to.
    """
    attached = masked_checkpoint(path, moved_to, checks)
    source = open_source(path) if attached is None else attached.base
    if mask == DENSE:
        return source
    if mask is not None:
        return masked(source, mask, checks)
    if attached is None:
        return source
    console.say(f"applying the {attached.how} of {path}")
    return through(attached)
