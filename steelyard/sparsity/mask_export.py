"""Exports the masks of a run: as a mask file, or as weights with zeros for other programs."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any, Literal

from steelyard import checkpoint
from steelyard.checkpoint.formats import is_own, open_source
from steelyard.checkpoint.formats.write import Target, convert, refuse_destination
from steelyard.core.errors import UserError
from steelyard.sparsity import frozen_base, mask_file
from steelyard.sparsity.mask_sources import SPARSITY, masked_checkpoint
from steelyard.sparsity.pruned_source import masked, through


def write(
    path: str,
    destination: Path,
    form: Literal["packed", "hf"],
    moved_to: str | None = None,
    tokenizer: str | None = None,
) -> dict[str, Any]:
    """Write the masks of a run or checkpoint; its base weights are verified in both formats."""
    if form == "packed" and tokenizer is not None:
        raise UserError(
            "a mask file contains no tokenizer", where="--tokenizer", hint="remove the option, or add --format hf"
        )
    refuse_destination(destination, is_file=form == "packed")
    attached = masked_checkpoint(path, moved_to)
    if attached is None:
        raise _no_masks(path)
    if form == "hf":
        return {"format": form, **convert(through(attached), destination, Target("hf", tokenizer=tokenizer))}
    masks = attached.masks
    each = ((name, masks.mask(name)) for name in masks.names())
    made_by = {"method": attached.how, "from": str(masks.path), "step": attached.step}
    mask_file.write(destination, each, masks.pattern, attached.identity or frozen_base.identity(attached.base), made_by)
    return {"format": form, **mask_file.described(destination)}


def apply(path: str, mask: Path, destination: Path, tokenizer: str | None = None) -> dict[str, Any]:
    """Write a checkpoint for transformers with a mask file applied."""
    refuse_destination(destination)
    return convert(masked(open_source(path), mask), destination, Target("hf", tokenizer=tokenizer))


def _no_masks(path: str) -> UserError:
    """The error for a path without masks; a run with fixed zeros has them only in its weights."""
    method = checkpoint.source(path).state.get(SPARSITY, {}).get("method") if is_own(path) else None
    if method == "fixed":
        return UserError(
            f"{path} keeps the zeros of its weights, and has no separate masks",
            hint=f"steelyard checkpoint convert {shlex.quote(path)} OUT --to hf writes the weights with their zeros; "
            "steelyard export-sparse writes them compressed",
        )
    return UserError(f"{path} has no masks", hint="give a run with a [sparsity] section or a MaskLLM checkpoint")


def as_text(result: dict[str, Any]) -> str:
    """One line about the written file."""
    if result["format"] == "hf":
        return f"{result['path']}: hf, {result['dtype']}"
    return (
        f"{result['path']}: {result['matrices']} {result['pattern']} masks, {result['bits_a_weight']} bits per weight"
    )
