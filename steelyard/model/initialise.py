"""Initial weights that depend on the seed and each parameter's name, and on nothing else.

Every parameter draws from a generator of its own, so that its values are the same whichever other parameters a rank
holds.
"""

from __future__ import annotations

import hashlib

import torch
from torch import nn

RESIDUAL_OUTPUTS = ("attention.output.weight", "mlp.down.weight")


def initialise(model: nn.Module, seed: int, std: float, layers: int) -> None:
    """Set all weights: normal with `std`; what adds to the residual stream is scaled down by the depth."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim < 2:
                parameter.fill_(1.0 if name.endswith("norm.weight") else 0.0)
                continue
            scale = std / (2 * layers) ** 0.5 if name.endswith(RESIDUAL_OUTPUTS) else std
            generator = torch.Generator().manual_seed(_seed_of(seed, name))
            parameter.copy_(torch.empty(parameter.shape).normal_(0, scale, generator=generator))


def _seed_of(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "little") >> 1
