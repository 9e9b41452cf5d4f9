"""How ranks share one-shot pruning: calibration windows over data ranks, matrices over tensor ranks.

    rank = data index x tensor ranks + tensor index

Every rank runs whole layers on its share of the batches of windows. Matrices with the same input form a group; a tensor
rank sums the inputs of every n-th group only, which are added over the data ranks. These prune the matrices of the
group in turns, whole, so that a matrix is pruned as by a single process. Then all ranks get all matrices of the layer:
they need them to compute the inputs of the next one, and rank 0 writes them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from steelyard.parallel.mesh import Mesh
from steelyard.sparsity.one_shot import Pruned


def has_group(mesh: Mesh, number: int) -> bool:
    """Whether this rank sums the inputs of a group."""
    return number % mesh.tensor.size == mesh.tensor.index


def owners(mesh: Mesh, groups: list[list[str]], is_calibrated: bool) -> dict[str, int]:
    """The rank that prunes each matrix. Without calibration every rank can prune any of them."""
    if not is_calibrated:
        return {name: number % mesh.world.size for number, [name] in enumerate(groups)}
    return {
        name: (member + number // mesh.tensor.size) % mesh.data.size * mesh.tensor.size + number % mesh.tensor.size
        for number, names in enumerate(groups)
        for member, name in enumerate(names)
    }


def sum_over_data(mesh: Mesh, sum_II: Tensor, tokens: int) -> int:
    """Add the sums of all data ranks in place; returns the number of all their tokens."""
    if mesh.data.size == 1:
        return tokens
    counted = torch.tensor(tokens, dtype=torch.int64, device=sum_II.device)
    for tensor in (sum_II, counted):
        dist.all_reduce(tensor, group=mesh.data.group)
    return int(counted)


def gathered(mesh: Mesh, rows: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The rows of the report of all ranks."""
    if mesh.world.size == 1:
        return rows
    everywhere: list[Any] = [None] * mesh.world.size
    dist.all_gather_object(everywhere, rows)
    return {name: row for each in everywhere for name, row in each.items()}


def exchanged(
    mesh: Mesh,
    owner_of: dict[str, int],
    mine: dict[str, Pruned],
    dense: Callable[[str], Tensor],
    update: bool,
    device: torch.device,
) -> dict[str, Pruned]:
    """The pruned matrices of all ranks, on the CPU. Weights are sent only if they were updated."""
    if mesh.world.size == 1:
        return mine
    found: dict[str, Pruned] = {}
    for name, owner in owner_of.items():
        weight_OI = mine[name].weight_OI if name in mine else torch.empty_like(dense(name))
        mask_OI = mine[name].mask_OI if name in mine else torch.empty(weight_OI.shape, dtype=torch.bool)
        mask_OI = _sent(mask_OI, owner, device)
        if update:
            weight_OI = _sent(weight_OI, owner, device)
        elif name not in mine:
            weight_OI = dense(name).masked_fill(~mask_OI, 0)
        found[name] = mine.get(name) or Pruned(mask_OI, weight_OI)
    return found


def _sent(tensor: Tensor, owner: int, device: torch.device) -> Tensor:
    """The owner's tensor, sent as bytes: not every backend sends every dtype."""
    sent = tensor.contiguous().view(torch.uint8).to(device)
    dist.broadcast(sent, owner)
    return sent.cpu().view(tensor.dtype)
