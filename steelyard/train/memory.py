"""How much memory a run really takes, said once its first steps are done."""

from __future__ import annotations

import resource

import torch
import torch.distributed as dist

from steelyard.core import units


def report(device: torch.device) -> str:
    """The most that ranks have taken so far, of the GPU or, without one, of the host. All ranks call this."""
    if device.type == "cuda":
        taken = [torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()]
        total = torch.cuda.get_device_properties(device).total_memory
    else:
        taken, total = [1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss] * 2, 0
    most = torch.tensor(taken, dtype=torch.int64, device=device)
    if dist.is_initialized():
        dist.all_reduce(most, dist.ReduceOp.MAX)
    allocated, reserved = (units.size(value) for value in most.tolist())
    where = f"GPU memory at most {allocated}, {reserved} with reserves, of {units.size(total)}"
    return where if device.type == "cuda" else f"memory at most {allocated} per process"
