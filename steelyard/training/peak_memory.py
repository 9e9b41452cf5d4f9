"""How much memory a run really takes: in every record, and said once its first steps are done.

On a GPU that is what tensors took of it at their fullest. Without one it is the largest resident set of the process,
which holds Python, torch's libraries and touched pages of token files too: what was resident before the model was built
goes into the manifest, so that readers can tell the model's share.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from steelyard.core import host, units


def begin(device: torch.device) -> int:
    """Forget earlier peaks, of a run in the same process for one; returns bytes taken now, the most of all ranks."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return _most([torch.cuda.memory_allocated(device)], device)[0]
    host.reset_peak()
    return _most([host.resident_bytes()], device)[0]


def peak(device: torch.device) -> int:
    """Bytes at the fullest moment of the fullest rank since `begin`. All ranks call this."""
    own = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else host.peak_resident_bytes()
    return _most([own], device)[0]


def report(device: torch.device) -> str:
    """The most that ranks have taken so far, of the GPU or, without one, of the host. All ranks call this."""
    if device.type != "cuda":
        return f"memory at most {units.size(peak(device))} per process"
    taken = [torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)]
    allocated, reserved = (units.size(value) for value in _most(taken, device))
    total = units.size(torch.cuda.get_device_properties(device).total_memory)
    return f"GPU memory at most {allocated}, {reserved} with reserves, of {total}"


def _most(values: list[int], device: torch.device) -> list[int]:
    """The largest of each over all ranks."""
    most = torch.tensor(values, dtype=torch.int64, device=device)
    if dist.is_initialized():
        dist.all_reduce(most, dist.ReduceOp.MAX)
    return [int(value) for value in most.tolist()]
