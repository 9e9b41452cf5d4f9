"""Masks that a checkpoint carries, as a mask file or as weights with zeros."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from steelyard.checkpoint.formats import Source
from steelyard.checkpoint.formats.write import Target, convert
from steelyard.core.errors import UserError
from steelyard.sparsity import base, masks
from steelyard.sparsity.maskllm import masks_in
from steelyard.sparsity.source import Masked


def export_masks(source: Source, destination: Path) -> dict[str, Any]:
    """Write the masks of a MaskLLM checkpoint as a mask file; its own weights are their base."""
    found = masks_in(source)
    if found is None:
        raise UserError(f"{source.path} carries no masks", mend="name a checkpoint of MaskLLM's or a mask run")
    if destination.exists():
        raise UserError(f"{destination} is there already", mend="name a new place")
    each = ((name, found.mask(name)) for name in found.names())
    made_by = {"method": "maskllm" if found.learned else "maskllm, one shot", "step": source.step}
    masks.write(destination, each, found.pattern, base.identity(source), made_by)
    return masks.described(destination)


def export_weights(source: Source, destination: Path) -> dict[str, Any]:
    """Write a MaskLLM checkpoint as a Hugging Face folder, with zeros where its masks have them."""
    found = masks_in(source)
    if found is None:
        raise UserError(f"{source.path} carries no masks", mend="name a checkpoint of MaskLLM's or a mask run")
    return convert(Masked(source, found), destination, Target("hf"))
