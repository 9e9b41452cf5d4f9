"""Reads MaskLLM's checkpoints: Megatron's `torch` files that also contain, for the weight of each linear module,

    <product>.diff_mask.gate           logits, (weights of this rank / 4, candidates), in row-major order of the weight
    <product>.diff_mask.mask_options   (1, candidates, 4), always the same
    <product>.mask                     the mask of the last forward pass or of one-shot pruning, shaped like the weight

If there are logits, they determine the mask: the candidate with the largest logit. Shards of tensor ranks are joined,
and Megatron's order of query, key, value and of gate and up is undone, exactly as for the weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from steelyard.checkpoint.formats import CheckpointSource
from steelyard.checkpoint.formats.key_mapping import Entry, taken_apart
from steelyard.checkpoint.formats.mapped_tensors import MappedSource
from steelyard.checkpoint.formats.megatron import Ranks
from steelyard.core.errors import UserError
from steelyard.sparsity.patterns import Pattern

GATE, OPTIONS, MASK = ".diff_mask.gate", ".diff_mask.mask_options", ".mask"
PATTERNS = {6: Pattern(2, 4), 4: Pattern(1, 4)}  # by the number of candidates


def masks_in(source: CheckpointSource) -> MaskLlm | None:
    """The masks of a MaskLLM checkpoint, or None if it is something else."""
    if isinstance(source, MappedSource) and isinstance(source.store, Ranks) and source.store.masks:
        return MaskLlm(source, source.store)
    return None


class MaskLlm:
    """The masks of a checkpoint, one matrix at a time."""

    def __init__(self, source: MappedSource, ranks: Ranks) -> None:
        self.path: Path = source.path
        self.base: dict[str, Any] = {}  # The weights are in the same checkpoint.
        self._config, self._ranks = source.config, ranks
        self._sizes = source.sizes()
        self._entries = {
            name: entry
            for entry in source.entries
            if any(entry.name.removesuffix(".weight") + kind in ranks.masks for kind in (GATE, MASK))
            for name in entry.ours
        }
        self.learned = any(name.endswith(GATE) for name in ranks.masks)
        lacking = [
            name for name, entry in self._entries.items() if self.learned and self._key(entry) not in ranks.masks
        ]
        if lacking or not self._entries:
            raise UserError(f"{lacking[0] if lacking else 'the checkpoint'} has no logits", where=str(self.path))
        self.pattern = self._pattern()

    def _key(self, entry: Entry) -> str:
        return entry.name.removesuffix(".weight") + (GATE if self.learned else MASK)

    def _pattern(self) -> Pattern:
        if not self.learned:
            return Pattern(2, 4)
        counts = {piece.shape[-1] for name, row in self._ranks.masks.items() if name.endswith(GATE) for piece in row}
        if len(counts) != 1 or counts - PATTERNS.keys():
            raise UserError(
                f"its logits have {' and '.join(map(str, sorted(counts)))} candidates",
                where=str(self.path),
                hint="six (2:4) and four (1:4) are supported",
            )
        pattern = PATTERNS[counts.pop()]
        for name, pieces in self._ranks.masks.items():
            if name.endswith(OPTIONS) and not torch.equal(pieces[0].float().squeeze(0), pattern.candidates()):
                raise UserError(f"{name} has the candidates in another order", where=str(self.path))
        return pattern

    def names(self) -> list[str]:
        """The masked matrices, by Steelyard's names."""
        return list(self._entries)

    def shape(self, name: str) -> tuple[int, int]:
        """The shape of a matrix, [out, in]."""
        rows, columns = self._sizes[name]
        return rows, columns

    def logits(self, name: str) -> Tensor:
        """The logits of a matrix, [out, in / 4, candidates], in fp32."""
        entry = self._entries[name]
        weights = self._ranks.pieces[entry.name]
        pieces = []
        for gate, weight in zip(self._ranks.masks[self._key(entry)], weights, strict=True):
            rows, columns = weight.shape
            if columns % self.pattern.group or gate.numel() != rows * columns // self.pattern.group * gate.shape[-1]:
                raise UserError(
                    f"{self._key(entry)} is {tuple(gate.shape)}, which does not fit a weight of {tuple(weight.shape)}",
                    where=str(self.path),
                )
            pieces.append(gate.float().view(rows, columns // self.pattern.group, gate.shape[-1]))
        return self._ours(entry, name, pieces)

    def mask(self, name: str) -> Tensor:
        """True where a weight is kept."""
        entry = self._entries[name]
        if not self.learned:
            return self._ours(entry, name, self._ranks.masks[self._key(entry)]) != 0
        candidates = self.pattern.candidates().bool()
        return candidates[self.logits(name).argmax(-1)].flatten(1)

    def _ours(self, entry: Entry, name: str, pieces: list[Tensor]) -> Tensor:
        whole = self._ranks.joined(entry, pieces)
        return taken_apart(entry, whole, self._config)[entry.ours.index(name)]
