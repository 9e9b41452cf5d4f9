"""`hosts/<host>.json`: facts about the ranks of each host, written after rendezvous.

    {"host": "a1", "ranks": [0, 1], "process ids": [311, 312], "device": "NVIDIA H200", "clock": 1700000000.0,
     "logged": 0, "versions": {"torch": ...}, "layout": {"world": 4, "tensor": 1, "pipeline": 2, ...}}

`clock` is the host's time right after a barrier, for comparing clocks. `layout` is the actual layout, for comparison
with the requested one. `logged` is the size of `logs/<host>.err` at that time: earlier errors did not stop these ranks.
`steelyard watch` reads these files.

The files describe the current session. `sessions.jsonl` keeps one object for each, appended by rank 0:

    {"time": 1700000000.0, "step": 300, "repeated": 12, "hosts": ["a1"], "devices": "NVIDIA H200", "layout": {...}}

`step` is the step it resumed at, `repeated` the number of recorded steps that it repeats.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import socket
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from steelyard.core import files
from steelyard.core.recipe import Recipe
from steelyard.core.run import SESSIONS, Run, versions
from steelyard.parallel.mesh import Mesh
from steelyard.parallel.world import World
from steelyard.sizes.stage_layers import partition_of

HOSTS = "hosts"


def report(folder: Run, recipe: Recipe, mesh: Mesh, world: World, device: torch.device, step: int) -> None:
    """Write the file of each host, on its first rank, and the session from `step` on. All ranks call this."""
    if world.is_rank0:
        shutil.rmtree(folder.path / HOSTS, ignore_errors=True)  # An earlier attempt may have had other hosts.
    if world.size > 1:
        dist.barrier()
    own = _own(recipe, mesh, world, device)
    all_ranks: list[dict[str, Any]] = [own] * world.size
    if world.size > 1:
        dist.all_gather_object(all_ranks, own)
    here = [each for each in all_ranks if each["host"] == own["host"]]
    if here[0]["rank"] == world.rank:
        reported = {key: value for key, value in own.items() if key not in ("rank", "process id")}
        reported["logged"] = _size(folder.path / "logs" / f"{own['host']}.err")
        reported |= {"ranks": [each["rank"] for each in here], "process ids": [each["process id"] for each in here]}
        files.write_json(folder.path / HOSTS / f"{own['host']}.json", reported)
    if world.is_rank0:
        _add_session(folder, all_ranks, step)


def _add_session(folder: Run, all_ranks: list[dict[str, Any]], step: int) -> None:
    started = {
        "time": all_ranks[0]["clock"],
        "step": step,
        "repeated": folder.repeated_steps,
        "hosts": list(dict.fromkeys(each["host"] for each in all_ranks)),
        "devices": ", ".join(sorted({each["device"] for each in all_ranks})),
        "layout": all_ranks[0]["layout"],
    }
    with open(folder.path / SESSIONS, "a", encoding="utf-8") as file:
        file.write(json.dumps(started) + "\n")


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _own(recipe: Recipe, mesh: Mesh, world: World, device: torch.device) -> dict[str, Any]:
    clock = time.time()
    return {
        "host": socket.gethostname(),
        "rank": world.rank,
        "process id": os.getpid(),
        "clock": clock,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu {platform.machine()}",
        "versions": versions() | ({"cuda": str(torch.version.cuda)} if device.type == "cuda" else {}),
        "layout": _layout(recipe, mesh, world),
    }


def _layout(recipe: Recipe, mesh: Mesh, world: World) -> dict[str, Any]:
    parallel, train = recipe.parallel, recipe.train
    return {
        "world": world.size,
        "tensor": mesh.tensor.size,
        "context": mesh.context.size,
        "pipeline": mesh.pipeline.size,
        "data": mesh.data.size,
        "virtual": parallel.virtual,
        "zero": parallel.zero,
        "schedule": parallel.schedule,
        "sequence_parallel": parallel.sequence_parallel,
        "partition": str(partition_of(recipe)),
        "global_batch": train.global_batch,
        "micro_batch": train.micro_batch,
        "precision": train.precision,
        "steps": train.steps,
    }
