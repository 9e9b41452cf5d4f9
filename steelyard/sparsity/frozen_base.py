"""The base weights of masks and adapters: their path, and a hash of their contents.

Masks are useless without the weights they were made for. So mask files and checkpoints record their base, and readers
verify that the weights are the same. The hash covers tensors under Steelyard's names, not files: a base that is
converted to another format, or sharded differently, is the same base.

    sha256 of the JSON [[name, dtype, size, sha256 of the bytes], ...], sorted by name, without rows that pad the
    vocabulary

Tensors are read sequentially and hashed by several threads: 70 billion parameters in bf16 are limited by eight cores
(about 10 GB/s) or the disk.
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

from steelyard.checkpoint import TensorShard
from steelyard.checkpoint.formats import CheckpointSource, load_shards, open_source
from steelyard.core.console import console
from steelyard.core.errors import UserError
from steelyard.core.recipe.model_section import ModelConfig
from steelyard.parallel.world import World, gather_errors, raise_on_all_ranks, run_on_rank0

THREADS = 8
VOCABULARY = ("embed.weight", "head.weight")


def identity(source: CheckpointSource) -> dict[str, str]:
    """Path and hash of a checkpoint, as recorded in mask files and in checkpoints of mask-learning runs."""
    return {"path": str(Path(source.path).resolve()), "sha256": fingerprint(source)}


def fingerprint(source: CheckpointSource) -> str:
    """The hash of all weights; reads all of them."""
    return joined(digests(source, source.names()))


def digests(source: CheckpointSource, names: list[str]) -> list[list[Any]]:
    """The entries of the hash for some of the weights."""
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
    """The hash of all weights, from the entries of each."""
    return hashlib.sha256(json.dumps(sorted(entries)).encode()).hexdigest()


def identity_by_all(path: str, world: World) -> dict[str, str]:
    """Path and hash of a checkpoint; each rank reads its share of the tensors."""
    with raise_on_all_ranks(world):
        source = open_source(path)
    with gather_errors(world):
        entries = digests(source, source.names()[world.rank :: world.size])
    if world.size > 1:
        all_ranks: list[Any] = [None] * world.size
        dist.all_gather_object(all_ranks, entries)
        entries = [entry for each in all_ranks for entry in each]
    return {"path": str(Path(source.path).resolve()), "sha256": joined(entries)}


def load(
    path: str,
    recorded: dict[str, Any] | None,
    pieces: dict[str, TensorShard],
    config: ModelConfig,
    world: World,
    hint: str,
) -> dict[str, str]:
    """Load frozen weights on all ranks and return their path and hash; refuse weights other than the recorded ones."""
    if recorded is not None:
        run_on_rank0(world, lambda: place(recorded, path, hint))
    own = identity_by_all(path, world)
    if recorded is not None:
        with raise_on_all_ranks(world):
            refuse_others(recorded, own, hint)
    with gather_errors(world):
        load_shards(open_source(path), pieces, config)
    return own


def found(recorded: dict[str, Any], moved_to: str | None, hint: str, checks: bool = True) -> CheckpointSource:
    """Open the base of masks and verify it; `hint` tells the user how to give its new path.

    `checks` reads all weights, so with many ranks only one needs to set it.
    """
    source = open_source(place(recorded, moved_to, hint))
    if checks:
        check(recorded, source, hint)
    return source


def place(recorded: dict[str, Any], moved_to: str | None, hint: str) -> str:
    """The current path of a base; raises if it does not exist."""
    path = str(moved_to or recorded.get("path", ""))
    if not path or not Path(path).expanduser().exists():
        raise UserError(f"the base weights of the masks do not exist at {path or 'any known path'}", hint=hint)
    return path


def check(recorded: dict[str, Any], source: CheckpointSource, hint: str) -> None:
    """Refuse weights other than the base of the masks."""
    refuse_others(recorded, {"path": str(source.path), "sha256": fingerprint(source)}, hint)


def refuse_others(recorded: dict[str, Any], identity: dict[str, str], hint: str) -> None:
    """Refuse weights whose hash is not the recorded one."""
    if recorded.get("sha256") != identity["sha256"]:
        raise UserError(f"the masks belong to other weights than those of {identity['path']}", hint=hint)


def _digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().flatten().view(torch.uint8).numpy().data).hexdigest()
