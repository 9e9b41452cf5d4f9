"""Check that tensors are finite, when weights are loaded and before a checkpoint is saved.

A NaN in one weight makes every loss NaN, and a checkpoint that contains one is useless. The minimum and maximum of a
tensor are NaN or infinite if any value is, so the check is one reduction per tensor and one synchronization per device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from steelyard.core.errors import UserError

CHECKED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
MOST_NAMED = 3


def nonfinite(tensors: Mapping[str, Tensor]) -> list[str]:
    """The names of the tensors that contain NaN or infinity."""
    by_device: dict[torch.device, dict[str, tuple[Tensor, Tensor]]] = {}
    for name, tensor in tensors.items():
        if tensor.dtype in CHECKED and tensor.numel():
            by_device.setdefault(tensor.device, {})[name] = tensor.detach().aminmax()
    names: list[str] = []
    for extremes in by_device.values():
        values = torch.stack([value for pair in extremes.values() for value in pair])
        finite = values.isfinite().view(-1, 2).all(dim=1).tolist()
        names += [name for name, is_finite in zip(extremes, finite, strict=True) if not is_finite]
    return names


def refuse_nonfinite(
    tensors: Mapping[str, Tensor], path: str | Path, hint: str = "use another checkpoint or another copy of the weights"
) -> None:
    """Raise if weights from a file contain NaN or infinity."""
    names = nonfinite(tensors)
    if names:
        raise UserError(f"NaN or infinite values in {listed(names)}", where=str(path), hint=hint)


def listed(names: Sequence[str]) -> str:
    """The first few names, and the number of the others."""
    more = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
