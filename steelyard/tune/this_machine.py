"""This machine as a cluster of one node, for the planner, if there is no cluster file."""

from __future__ import annotations

import itertools
import os
from dataclasses import replace

from steelyard.core.host import usable_cpus
from steelyard.core.recipe import Recipe
from steelyard.planning.cluster import CORE, Cluster, Nodes, OwnGpu
from steelyard.sizes.gpu_catalogue import GIB, Gpu, by_device_name

HERE = "here"


def here(recipe: Recipe, ranks: int) -> Cluster | None:
    """One node with one device per rank; None if its GPUs are not in the catalogue or too few."""
    gpus = [] if recipe.train.device == "cpu" else visible_gpus()
    if not gpus:
        return _of(_core(ranks), ranks)
    name, memory = min(gpus, key=lambda gpu: gpu[1])
    known = by_device_name(name)
    if known is None or len(gpus) < ranks:
        return None
    return _of(replace(known, memory_gib=memory / GIB), ranks)


def names() -> set[str]:
    """Names of this machine's devices in profiles: catalogue names, or else their own."""
    gpus = {name for name, _ in visible_gpus()}
    return {known.name if (known := by_device_name(name)) else name for name in gpus} or {CORE.name}


def visible_gpus() -> list[tuple[str, int]]:
    """Name and memory of each GPU visible to this process, without importing torch."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # No library, no driver or no device.
        return []
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        gpus = [
            (_text(pynvml.nvmlDeviceGetName(handle)), int(pynvml.nvmlDeviceGetMemoryInfo(handle).total))
            for handle in handles
        ]
    except pynvml.NVMLError:
        return []
    finally:
        pynvml.nvmlShutdown()
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if allowed is None:
        return gpus
    numbers = named_gpus(allowed)
    return [gpus[int(word)] if word.isdigit() and int(word) < len(gpus) else gpus[0] for word in numbers if gpus]


def named_gpus(allowed: str) -> list[str]:
    """The GPUs in CUDA_VISIBLE_DEVICES. As in CUDA, the list ends at the first invalid index (-1)."""
    words = (word.strip() for word in allowed.split(",") if word.strip())
    return list(itertools.takewhile(lambda word: not word.startswith("-"), words))


def _text(name: str | bytes) -> str:
    return name.decode() if isinstance(name, bytes) else name


def _core(ranks: int) -> Gpu:
    """A rank's share of this host's cores and memory, from the planner's numbers for one core."""
    cores = max(1, len(usable_cpus()) // ranks)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / ranks / GIB
    fp32, half = cores * (CORE.fp32 or 0.0), cores * (CORE.fp16 or 0.0)
    return replace(CORE, memory_gib=memory, fp32=fp32, fp16=half, bf16=half)


def _of(gpu: Gpu, ranks: int) -> Cluster:
    own = OwnGpu(
        name=HERE, memory_gib=gpu.memory_gib or 1.0, fp32=gpu.fp32, tf32=gpu.tf32, fp16=gpu.fp16, bf16=gpu.bf16,
        fp8=gpu.fp8, bandwidth_gb=gpu.bandwidth_gb or 8.0, units=gpu.units or 1, watts=gpu.watts,
        link_gb=gpu.link_gb or 2.0, sustained=gpu.sustained,
    )  # fmt: skip
    return Cluster(name=HERE, nodes=[Nodes(type=HERE, count=1, gpu=HERE, gpus=ranks)], links=[], gpus=[own])
