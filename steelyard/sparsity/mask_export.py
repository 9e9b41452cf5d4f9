"""Masks leave the run that made them: as a mask file, or as weights with zeros for any other program."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any, Literal

from steelyard import checkpoint
from steelyard.checkpoint.formats import is_own, open_source
from steelyard.checkpoint.formats.write import Target, convert, refuse_destination
from steelyard.core.errors import UserError
from steelyard.sparsity import frozen_base, mask_file
from steelyard.sparsity.mask_sources import SPARSITY, carried
from steelyard.sparsity.pruned_source import masked, through


def write(
    path: str,
    destination: Path,
    form: Literal["packed", "hf"],
    moved_to: str | None = None,
    tokenizer: str | None = None,
) -> dict[str, Any]:
    """Write the masks that a run or a checkpoint brings; its weights are checked either way."""
    if form == "packed" and tokenizer is not None:
        raise UserError(
            "a file of masks holds no tokenizer", where="--tokenizer", hint="leave it out, or add --format hf"
        )
    refuse_destination(destination, is_file=form == "packed")
    brought = carried(path, moved_to)
    if brought is None:
        raise _brings_none(path)
    if form == "hf":
        return {"format": form, **convert(through(brought), destination, Target("hf", tokenizer=tokenizer))}
    found = brought.masks
    each = ((name, found.mask(name)) for name in found.names())
    made_by = {"method": brought.how, "from": str(found.path), "step": brought.step}
    mask_file.write(destination, each, found.pattern, brought.identity or frozen_base.identity(brought.base), made_by)
    return {"format": form, **mask_file.described(destination)}


def apply(path: str, mask: Path, destination: Path, tokenizer: str | None = None) -> dict[str, Any]:
    """Write a checkpoint for transformers, with zeros where a mask file has them."""
    refuse_destination(destination)
    return convert(masked(open_source(path), mask), destination, Target("hf", tokenizer=tokenizer))


def _brings_none(path: str) -> UserError:
    """Why there is nothing to export; a run that keeps zeros has them in its weights already."""
    method = checkpoint.source(path).state.get(SPARSITY, {}).get("method") if is_own(path) else None
    if method == "fixed":
        return UserError(
            f"{path} keeps the zeros that its weights had, and holds no masks beside them",
            hint=f"steelyard checkpoint convert {shlex.quote(path)} OUT --to hf writes the weights, zeros and all; "
            "steelyard export-sparse writes them compressed",
        )
    return UserError(
        f"{path} brings no masks", hint="name a run with a [sparsity] section or a checkpoint of MaskLLM's"
    )


def as_text(result: dict[str, Any]) -> str:
    """What was written, in a line."""
    if result["format"] == "hf":
        return f"{result['path']}: hf, {result['dtype']}"
    return (
        f"{result['path']}: {result['matrices']} masks of {result['pattern']}, {result['bits_a_weight']} bits a weight"
    )
