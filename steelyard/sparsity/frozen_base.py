"""Which weights a mask belongs to: where they lie, and a hash of what they are.

Masks say nothing without the weights they were found for. So what holds masks names its base, and whoever puts the two
together checks that they are the same weights still. The hash is over tensors under Steelyard's names, not over files:
a base that was converted to another format, or cut into other shards, is the same base.

    sha256 of the JSON [[name, dtype, size, sha256 of the bytes], ...], sorted by name, rows that pad the vocabulary
    left out

Tensors are read one after the other and hashed by several threads: 70 billion parameters in bf16 are as fast as eight
cores (about 10 GB/s) or the disk.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from steelyard.checkpoint.formats import CheckpointSource, open_source
from steelyard.core.console import console
from steelyard.core.errors import UserError
from steelyard.parallel.world import World, gather_errors, raise_on_all_ranks

THREADS = 8
VOCABULARY = ("embed.weight", "head.weight")


def identity(source: CheckpointSource) -> dict[str, str]:
    """Path and hash of a checkpoint, as a mask file and a checkpoint of a learned run hold them."""
    return {"path": str(Path(source.path).resolve()), "sha256": fingerprint(source)}


def fingerprint(source: CheckpointSource) -> str:
    """A hash of all weights. Every one of them is read."""
    return joined(digests(source, source.names()))


def digests(source: CheckpointSource, names: list[str]) -> list[list[Any]]:
    """What a hash of all weights is made of, for some of them."""
    entries: list[list[Any]] = []
    waiting: deque[tuple[str, Tensor, Future[str]]] = deque()

    def settle() -> None:
        name, tensor, digest = waiting.popleft()
        entries.append([name, str(tensor.dtype), list(tensor.shape), digest.result()])

    with ThreadPoolExecutor(THREADS) as pool, console.progress("checking the base", len(names), "tensors") as progress:
        for name in names:
            tensor = source.tensor(name)
            if name in VOCABULARY:
                tensor = tensor[: source.config.vocab]
            waiting.append((name, tensor, pool.submit(_digest, tensor)))
            progress.advance(1)
            while len(waiting) > THREADS:
                settle()
        while waiting:
            settle()
    return entries


def joined(entries: list[list[Any]]) -> str:
    """The hash of all weights, from what ranks have found of each."""
    return hashlib.sha256(json.dumps(sorted(entries)).encode()).hexdigest()


def identity_by_all(path: str, world: World) -> dict[str, str]:
    """Path and hash of a checkpoint, each rank of the world reading its share of the tensors."""
    with raise_on_all_ranks(world):
        source = open_source(path)
    with gather_errors(world):
        entries = digests(source, source.names()[world.rank :: world.size])
    if world.size > 1:
        everyones: list[Any] = [None] * world.size
        dist.all_gather_object(everyones, entries)
        entries = [entry for each in everyones for entry in each]
    return {"path": str(Path(source.path).resolve()), "sha256": joined(entries)}


def found(recorded: dict[str, Any], moved_to: str | None, hint: str, checks: bool = True) -> CheckpointSource:
    """The base that masks belong to, opened and checked; `mend` says how to name the place it was moved to.

    Of many ranks one `checks`, which costs reading everything, and the others may do without.
    """
    source = open_source(place(recorded, moved_to, hint))
    if checks:
        check(recorded, source, hint)
    return source


def place(recorded: dict[str, Any], moved_to: str | None, hint: str) -> str:
    """Where a base is now; asked for where it is not at its place."""
    path = str(moved_to or recorded.get("path", ""))
    if not path or not Path(path).expanduser().exists():
        raise UserError(f"the weights that the masks belong to are not at {path or 'any known place'}", hint=hint)
    return path


def check(recorded: dict[str, Any], source: CheckpointSource, hint: str) -> None:
    """Refuse weights that are not those the masks were found for."""
    refuse_others(recorded, {"path": str(source.path), "sha256": fingerprint(source)}, hint)


def refuse_others(recorded: dict[str, Any], found: dict[str, str], hint: str) -> None:
    """Refuse weights of another hash than the recorded one."""
    if recorded.get("sha256") != found["sha256"]:
        raise UserError(f"the masks belong to other weights than those of {found['path']}", hint=hint)


def _digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().flatten().view(torch.uint8).numpy().data).hexdigest()
