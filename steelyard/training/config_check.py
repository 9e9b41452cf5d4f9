"""Whether all ranks read the same recipe, asked when they meet and before anything is written.

A node with an old copy of the file, or ranks that were given other overrides, would train on side by side, each by its
own rules. What may differ is what changes nothing of what is trained: the run's name, how a job is submitted, and where
on its disks a machine keeps the files that others find elsewhere.
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
# Files that each machine may keep in a folder of its own; what they are called there is compared.
PLACES = (
    "data.tokenizer", "data.train", "data.valid", "data.test", "train.init_from", "sparsity.base", "sparsity.prior",
    "sparsity.mask", "finetune.data", "finetune.valid", "finetune.template",
)  # fmt: skip
MOST_NAMED = 4


def refuse_other_recipes(recipe: Recipe, world: World) -> None:
    """Refuse ranks whose recipes differ, naming keys and hosts. All ranks call this together and find the same."""
    if world.size == 1:
        return
    own = compared(recipe)
    digest = hashlib.sha256(json.dumps(own, sort_keys=True).encode()).hexdigest()
    digests: list[str] = [digest] * world.size
    dist.all_gather_object(digests, digest)
    if len(set(digests)) == 1:
        return
    everyone: list[tuple[str, dict[str, str]]] = [("", {})] * world.size
    dist.all_gather_object(everyone, (socket.gethostname(), own))
    lines = "\n".join(f"  {line}" for line in differences(everyone))
    raise UserError(
        f"the ranks read different recipes:\n{lines}",
        hint="have every node read the same file, and give every rank the same overrides",
    )


def compared(recipe: Recipe) -> dict[str, str]:
    """Every key that must be alike on all ranks, with its value as it is compared and told."""
    own = {key: value for key, value in leaves(recipe.settings()) if not key.startswith(NOT_COMPARED)}
    return {key: json.dumps(_called(value) if key in PLACES else value, default=str) for key, value in own.items()}


def _called(value: Any) -> Any:
    """A path, or all paths in a list or table, without the folders before the last name."""
    if isinstance(value, list):
        return [_called(each) for each in value]
    if isinstance(value, dict):
        return {key: _called(each) for key, each in value.items()}
    return PurePath(value).name if isinstance(value, str) else value


def differences(everyone: list[tuple[str, dict[str, str]]]) -> list[str]:
    """A line for each key that is not alike: what it is on most ranks first, and on whom it is what else."""
    lines = []
    for key in sorted({key for _, own in everyone for key in own}):
        who: dict[str, list[int]] = {}
        for rank, (_, own) in enumerate(everyone):
            who.setdefault(own.get(key, "unset"), []).append(rank)
        if len(who) > 1:
            shares = sorted(who.items(), key=lambda item: -len(item[1]))
            reported = [f"{value} on {_names(everyone, ranks)}" for value, ranks in shares]
            lines.append(f"{key}: {', '.join(reported)}")
    return lines


def _names(everyone: list[tuple[str, dict[str, str]]], ranks: list[int]) -> str:
    """The hosts of ranks, or, where others of the same host read something else, the ranks themselves."""
    hosts = {everyone[rank][0] for rank in ranks}
    is_whole = all(rank in ranks for rank, (host, _) in enumerate(everyone) if host in hosts)
    names = sorted(hosts) if is_whole else [f"rank {rank} ({everyone[rank][0]})" for rank in ranks]
    if len(names) == 1:
        return names[0]
    if len(names) > MOST_NAMED:
        return f"{', '.join(names[:MOST_NAMED])} and {len(names) - MOST_NAMED} more"
    return f"{', '.join(names[:-1])} and {names[-1]}"
