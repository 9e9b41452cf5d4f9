"""Initial weights that depend only on the seed and the name of the parameter.

Rows are sampled in blocks, each with its own generator. So a rank that holds some rows samples little more than those,
and the values are the same for every layout. They are sampled on the CPU, so they are the same for every device.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

RESIDUAL_OUTPUTS = ("attention.output.weight", ".down.weight")
EXPERTS = ".experts."
BLOCK = 256  # rows


def initial(name: str, rows: range, row_shape: Sequence[int], seed: int, std: float, layers: int) -> Tensor:
    """Rows of a parameter: normal with `std`; weights that add to the residual stream are scaled down by the depth.

    Experts are a list of matrices, each sampled like a parameter of its own.
    """
    if EXPERTS in name and len(row_shape) == 2:
        height, *width = row_shape
        matrices = [initial(f"{number}/{name}", range(height), width, seed, std, layers) for number in rows]
        return torch.stack(matrices) if matrices else torch.empty(0, *row_shape, device="cpu")
    if not row_shape:
        return torch.full((len(rows),), 1.0 if name.endswith("norm.weight") else 0.0, device="cpu")
    scale = std / (2 * layers) ** 0.5 if name.endswith(RESIDUAL_OUTPUTS) else std
    values = torch.empty(len(rows), *row_shape, device="cpu")
    for block in range(rows.start // BLOCK, -(-rows.stop // BLOCK)):
        generator = torch.Generator().manual_seed(_seed_of(seed, f"{name}/{block}"))
        drawn = torch.empty(BLOCK, *row_shape, device="cpu").normal_(0, scale, generator=generator)
        first, stop = max(rows.start, block * BLOCK), min(rows.stop, (block + 1) * BLOCK)
        values[first - rows.start : stop - rows.start] = drawn[first - block * BLOCK : stop - block * BLOCK]
    return values


def init_weights(model: torch.nn.Module, seed: int, std: float, layers: int) -> None:
    """Set all weights of a whole model."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            rows, *row_shape = parameter.shape
            parameter.copy_(initial(name, range(rows), row_shape, seed, std, layers))


def _seed_of(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "little") >> 1
