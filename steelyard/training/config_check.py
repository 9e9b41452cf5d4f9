"""Checks that all ranks read the same recipe, after rendezvous and before anything is written.

A node with an old copy of the file, or ranks with other overrides, would silently train with other settings. Keys that
do not affect training may differ: the run's name, the job submission, and the folders in which a machine has its files.
"""

from __future__ import annotations

import hashlib
import json
import socket
from pathlib import PurePath
from typing import Any

import torch.distributed as dist

from steelyard.core.errors import UserError
from steelyard.core.recipe import Recipe
from steelyard.core.recipe.toml import leaves
from steelyard.parallel.world import World

NOT_COMPARED = ("name", "description", "data.index_cache", "site.")
# Files that each machine may have in another folder; only their names are compared.
PATH_KEYS = (
    "data.tokenizer", "data.train", "data.valid", "data.test", "train.init_from", "sparsity.base", "sparsity.prior",
    "sparsity.mask", "finetune.data", "finetune.valid", "finetune.template",
)  # fmt: skip
MOST_NAMED = 4


def refuse_other_recipes(recipe: Recipe, world: World) -> None:
    """Raise if the recipes of ranks differ, with keys and hosts. All ranks call this and get the same result."""
    if world.size == 1:
        return
    own = compared(recipe)
    digest = hashlib.sha256(json.dumps(own, sort_keys=True).encode()).hexdigest()
    digests: list[str] = [digest] * world.size
    dist.all_gather_object(digests, digest)
    if len(set(digests)) == 1:
        return
    all_ranks: list[tuple[str, dict[str, str]]] = [("", {})] * world.size
    dist.all_gather_object(all_ranks, (socket.gethostname(), own))
    lines = "\n".join(f"  {line}" for line in differences(all_ranks))
    raise UserError(
        f"the ranks read different recipes:\n{lines}",
        hint="use the same file on every node, and the same overrides on every rank",
    )


def compared(recipe: Recipe) -> dict[str, str]:
    """Every key that must be equal on all ranks, with its value as text."""
    own = {key: value for key, value in leaves(recipe.settings()) if not key.startswith(NOT_COMPARED)}
    return {key: json.dumps(_basename(value) if key in PATH_KEYS else value, default=str) for key, value in own.items()}


def _basename(value: Any) -> Any:
    """The last component of a path, or of all paths in a list or table."""
    if isinstance(value, list):
        return [_basename(each) for each in value]
    if isinstance(value, dict):
        return {key: _basename(each) for key, each in value.items()}
    return PurePath(value).name if isinstance(value, str) else value


def differences(all_ranks: list[tuple[str, dict[str, str]]]) -> list[str]:
    """A line for each key that differs: its values and their ranks, the most frequent value first."""
    lines = []
    for key in sorted({key for _, own in all_ranks for key in own}):
        ranks_by_value: dict[str, list[int]] = {}
        for rank, (_, own) in enumerate(all_ranks):
            ranks_by_value.setdefault(own.get(key, "unset"), []).append(rank)
        if len(ranks_by_value) > 1:
            shares = sorted(ranks_by_value.items(), key=lambda item: -len(item[1]))
            reported = [f"{value} on {_names(all_ranks, ranks)}" for value, ranks in shares]
            lines.append(f"{key}: {', '.join(reported)}")
    return lines


def _names(all_ranks: list[tuple[str, dict[str, str]]], ranks: list[int]) -> str:
    """The hosts of ranks, or the ranks themselves if other ranks of the same host have another value."""
    hosts = {all_ranks[rank][0] for rank in ranks}
    is_whole = all(rank in ranks for rank, (host, _) in enumerate(all_ranks) if host in hosts)
    names = sorted(hosts) if is_whole else [f"rank {rank} ({all_ranks[rank][0]})" for rank in ranks]
    if len(names) == 1:
        return names[0]
    if len(names) > MOST_NAMED:
        return f"{', '.join(names[:MOST_NAMED])} and {len(names) - MOST_NAMED} more"
    return f"{', '.join(names[:-1])} and {names[-1]}"
