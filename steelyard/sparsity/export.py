"""Masks leave the run that made them: as a mask file, or as weights with zeros for any other program."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from steelyard.checkpoint.formats.write import Target, convert
from steelyard.core.errors import UserError
from steelyard.sparsity import base, masks
from steelyard.sparsity.carried import carried
from steelyard.sparsity.source import through


def write(path: str, destination: Path, form: Literal["packed", "hf"], moved_to: str | None = None) -> dict[str, Any]:
    """Write the masks that a run or a checkpoint brings; its weights are checked either way."""
    brought = carried(path, moved_to)
    if brought is None:
        raise UserError(
            f"{path} brings no masks",
            mend="name a run with a [sparsity] section or a checkpoint of MaskLLM's",
        )
    if form == "hf":
        return {"format": form, **convert(through(brought), destination, Target("hf"))}
    if destination.exists():
        raise UserError(f"{destination} is there already", mend="name a new file, such as learned.mask")
    found = brought.masks
    each = ((name, found.mask(name)) for name in found.names())
    made_by = {"method": brought.how, "from": str(found.path), "step": brought.step}
    masks.write(destination, each, found.pattern, brought.identity or base.identity(brought.base), made_by)
    return {"format": form, **masks.described(destination)}


def as_text(result: dict[str, Any]) -> str:
    """What was written, in a line."""
    if result["format"] == "hf":
        return f"{result['path']}: hf, {result['dtype']}"
    return (
        f"{result['path']}: {result['matrices']} masks of {result['pattern']}, {result['bits_a_weight']} bits a weight"
    )
