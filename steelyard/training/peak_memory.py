"""Peak memory of a run: in every record, and logged once after the first steps.

On a GPU this is the peak of allocated tensors. Without a GPU it is the peak resident set of the process, which includes
Python, torch's libraries and pages of token files. The manifest holds the resident set before the model was built, so
that readers can compute the model's share.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from steelyard.core import host, units


def begin(device: torch.device) -> int:
    """Reset earlier peaks (of a run in the same process); returns bytes in use now, the maximum over ranks."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return _max_over_ranks([torch.cuda.memory_allocated(device)], device)[0]
    host.reset_peak()
    return _max_over_ranks([host.resident_bytes()], device)[0]


def peak(device: torch.device) -> int:
    """Peak bytes of the fullest rank since `begin`. All ranks call this."""
    own = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else host.peak_resident_bytes()
    return _max_over_ranks([own], device)[0]


def report(device: torch.device) -> str:
    """The peak over ranks so far, of GPU memory or, without a GPU, of host memory. All ranks call this."""
    if device.type != "cuda":
        return f"memory at most {units.size(peak(device))} per process"
    peaks = [torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)]
    allocated, reserved = (units.size(value) for value in _max_over_ranks(peaks, device))
    total = units.size(torch.cuda.get_device_properties(device).total_memory)
    return f"GPU memory at most {allocated}, {reserved} with the allocator's cache, of {total}"


def _max_over_ranks(values: list[int], device: torch.device) -> list[int]:
    """The maximum of each value over all ranks."""
    most = torch.tensor(values, dtype=torch.int64, device=device)
    if dist.is_initialized():
        dist.all_reduce(most, dist.ReduceOp.MAX)
    return [int(value) for value in most.tolist()]
