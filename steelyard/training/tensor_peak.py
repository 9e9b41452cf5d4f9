"""The peak memory of tensors in a step.

A GPU's allocator counts it. The CPU's does not, and the resident set of a process includes much else. So on a CPU one
more step runs under PyTorch's profiler, whose trace has every allocation, on top of the tensors that exist before it.
"""

from __future__ import annotations

import gc
import tempfile
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from steelyard.core.safe_parse import loads


def held_bytes(device: torch.device) -> int:
    """Bytes of the tensors that exist now."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    storages = {}
    with warnings.catch_warnings():  # Some objects warn when their class is asked for.
        warnings.simplefilter("ignore")
        for each in gc.get_objects():
            if type(each) in (torch.Tensor, torch.nn.Parameter) and each.device.type == "cpu":
                storage = each.untyped_storage()
                with suppress(RuntimeError):  # The compiler's own tensors may have no data.
                    storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def cpu_peak(step: Callable[[], object]) -> int:
    """Peak bytes of CPU tensors during a step, those that exist before it included."""
    before = held_bytes(torch.device("cpu"))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = loads(path.read_text(encoding="utf-8"))["traceEvents"]
    changes = sorted(
        (event["ts"], event["args"]["Bytes"])
        for event in events
        if event.get("name") == "[memory]" and event["args"].get("Device Type") == 0
    )
    now = most = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return before + most
