"""Sources of masks: mask files, mask-learning, SR-STE and joint runs, and MaskLLM checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from steelyard import checkpoint
from steelyard.checkpoint.formats import CheckpointSource, is_own, open_source
from steelyard.core.errors import UserError
from steelyard.sparsity import frozen_base, gumbel, maskllm
from steelyard.sparsity.mask_file import MaskFile, is_mask_file
from steelyard.sparsity.patterns import Pattern
from steelyard.sparsity.target_modules import chosen, maskable

MOVED = "give their current path with --base PATH"
LOGITS = "mask_logits"
JOINT_MASK = "kept"  # the masks of a joint run
SPARSITY = "sparsity"  # the key in a checkpoint's train state


class Masks(Protocol):
    """Masks of whole matrices, by Steelyard's names."""

    path: Path
    pattern: Pattern
    base: dict[str, Any]
    """Path and hash of the weights that they were made for, if known."""

    def names(self) -> list[str]:
        """The matrices that have masks."""

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a weight, [out, in] or [experts, out, in]."""

    def mask(self, name: str) -> Tensor:
        """True where a weight is kept."""


@dataclass(frozen=True)
class MaskedCheckpoint:
    """Masks and the weights they belong to."""

    masks: Masks
    base: CheckpointSource
    step: int | None
    tokenizer: str | None
    identity: dict[str, str] | None
    """Path and hash of the weights, if already known."""
    how: str
    """The kind of masks, as text."""


class RunMasks:
    """The masks of a mask-learning run, from a checkpoint of any layout."""

    def __init__(self, saved: checkpoint.Checkpoint) -> None:
        self.saved, self.path = saved, saved.path
        self.about: dict[str, Any] = saved.state[SPARSITY]
        self.pattern = Pattern.parse(str(self.about["pattern"]), where=str(saved.path))
        self.base: dict[str, Any] = self.about["base"]
        self._sizes = {
            name.removeprefix("model.").removesuffix(LOGITS) + "weight": size
            for name, size in saved.shapes().items()
            if name.startswith("model.") and name.endswith(LOGITS)
        }

    def names(self) -> list[str]:
        """The matrices that have masks."""
        return list(self._sizes)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a weight, [out, in] or [experts, out, in]."""
        *rows, groups, _ = self._sizes[name]
        return *rows, groups * self.pattern.group

    def logits(self, name: str) -> Tensor:
        """The logits of a weight, [out, in / 4, candidates] or with experts before, in fp32."""
        tensor = torch.empty(self._sizes[name])
        checkpoint.load(self.saved, {f"model.{name.removesuffix('weight')}{LOGITS}": tensor})
        return tensor

    def mask(self, name: str) -> Tensor:
        """True where a weight is kept: the candidate with the largest logit."""
        return gumbel.argmax_mask(self.logits(name), self.pattern.candidates())


class MagnitudeMasks:
    """The masks of an SR-STE run: the largest weights of each group."""

    def __init__(self, source: CheckpointSource, about: dict[str, Any]) -> None:
        self.source, self.path = source, source.path
        self.base: dict[str, Any] = {}  # The run's own weights, which change in training.
        self.pattern = Pattern.parse(str(about["pattern"]), where=str(source.path))
        self._sizes = maskable(source.config)
        self._names = chosen(self._sizes, about.get("include", []), about.get("exclude", []))

    def names(self) -> list[str]:
        """The matrices that have masks."""
        return list(self._names)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a weight, [out, in] or [experts, out, in]."""
        return self._sizes[name]

    def mask(self, name: str) -> Tensor:
        """True where a weight is kept."""
        return self.pattern.keep_best(self.source.tensor(name).abs())


class StoredMasks:
    """The masks of a joint run, which its checkpoints hold beside the weights."""

    def __init__(self, saved: checkpoint.Checkpoint) -> None:
        self.saved, self.path = saved, saved.path
        self.base: dict[str, Any] = {}  # The run's own weights, which change in training.
        self.pattern = Pattern.parse(str(saved.state[SPARSITY]["pattern"]), where=str(saved.path))
        self._sizes = {
            name.removeprefix("masks.").removesuffix(f".{JOINT_MASK}"): size
            for name, size in saved.shapes().items()
            if name.startswith("masks.") and name.endswith(f".{JOINT_MASK}")
        }

    def names(self) -> list[str]:
        """The matrices that have masks."""
        return list(self._sizes)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a weight, [out, in]."""
        return self._sizes[name]

    def mask(self, name: str) -> Tensor:
        """True where a weight is kept."""
        kept = torch.empty(self._sizes[name], dtype=torch.uint8)
        checkpoint.load(self.saved, {f"masks.{name}.{JOINT_MASK}": kept})
        return kept.bool()


def masked_checkpoint(
    path: str | Path, moved_to: str | None = None, checks: bool = True, hint: str = MOVED
) -> MaskedCheckpoint | None:
    """The masks of a run or checkpoint and its weights; None if it has no masks.

    Without `checks` the weights are not verified against the masks. `hint` tells the user how to give the weights' new
    path.
    """
    if not is_own(path):
        source = open_source(path)
        own = maskllm.masks_in(source)
        if own is None:
            return None
        return MaskedCheckpoint(
            own, source, source.step, source.tokenizer, None, "learned masks" if own.learned else "masks"
        )
    saved = checkpoint.source(path)
    about = saved.state.get(SPARSITY, {})
    if about.get("method") in ("sr-ste", "joint"):
        source = open_source(path)
        masks = MagnitudeMasks(source, about) if about["method"] == "sr-ste" else StoredMasks(saved)
        return MaskedCheckpoint(masks, source, source.step, source.tokenizer, None, "N:M masks")
    if about.get("method") != "learned":
        return None
    source = frozen_base.found(about["base"], moved_to, hint, checks)
    tokenizer = saved.run.recipe().data.tokenizer or source.tokenizer
    identity = {"path": str(Path(source.path).resolve()), "sha256": str(about["base"]["sha256"])}
    return MaskedCheckpoint(RunMasks(saved), source, saved.step, tokenizer, identity, "learned masks")


def masks_of(path: str) -> Masks:
    """The masks of a mask file, run or checkpoint, without verifying its weights."""
    if is_mask_file(path):
        return MaskFile(path)
    if is_own(path):
        saved = checkpoint.source(path)
        if saved.state.get(SPARSITY, {}).get("method") == "learned":
            return RunMasks(saved)
    masks = masked_checkpoint(path) if Path(path).is_dir() else MaskFile(path)
    if masks is None:
        raise UserError(
            f"{path} has no masks",
            hint="give a mask file, a run with a [sparsity] section, or a MaskLLM checkpoint",
        )
    return masks.masks if isinstance(masks, MaskedCheckpoint) else masks
