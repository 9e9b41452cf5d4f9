"""Profiles the steps in `log.profile` on the ranks in `log.profile_ranks`.

    profile/torch-rank-00000.json.gz     a trace of torch's profiler, in the Chrome trace format
    profile/memory-rank-00000.json.gz    the same with every allocation
    profile/memory-rank-00000.pickle     on a GPU: the allocator's history, for PyTorch's memory viewer

Nsight's tools attach from outside: for them the steps run between cudaProfilerStart and cudaProfilerStop, in NVTX
ranges. For all tools the parts of a step (data, forward 3, gradients, ...) are named ranges.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, record_function

from steelyard.core import files
from steelyard.core.console import console
from steelyard.core.errors import UserError
from steelyard.core.recipe import Recipe
from steelyard.core.recipe.log_section import LogSection
from steelyard.training.timeline import Timeline

PROFILE = "profile"
BY_TORCH = ("torch", "memory")
MOST_ALLOCATIONS = 1_000_000


Pause = Callable[[], AbstractContextManager[None]]


class Profiler:
    """Starts and stops the profiler. Time in `paused` does not count as step time."""

    def __init__(
        self, log: LogSection, folder: Path, device: torch.device, rank: int, timeline: Timeline, paused: Pause
    ) -> None:
        self.log, self.folder, self.device, self.rank, self.timeline = log, folder, device, rank, timeline
        self._paused = paused
        self.is_chosen = not log.profile_ranks or rank in log.profile_ranks
        self._profile: Any = None
        self._is_started = False

    @contextmanager
    def around(self, step: int) -> Iterator[None]:
        """Run a step, profiled if it is in `log.profile`."""
        steps, tool = self.log.profile, self.log.profile_tool
        if steps is None or not steps[0] <= step <= steps[1]:
            yield
            return
        if not self.is_chosen or (tool not in BY_TORCH and self.device.type != "cuda"):
            yield
        else:
            if not self._is_started:
                self._start()
            with self._in_ranges(step):
                yield
        if step == steps[1]:
            with self._paused():
                self._stop()

    def finish(self) -> None:
        """Write the trace so far, when the run ends before the last step to profile."""
        if self._profile is not None:
            console.warn("the run ends before the last step of log.profile: the trace holds the steps up to here")
            self._write()

    @contextmanager
    def _in_ranges(self, step: int) -> Iterator[None]:
        ranges = TorchRanges() if self.log.profile_tool in BY_TORCH else NvtxRanges()
        with ranges.around(f"step {step}"):
            self.timeline.ranges = ranges
            ranges.next("data")
            try:
                yield
            finally:
                self.timeline.ranges = None

    def _start(self) -> None:
        self._is_started = True
        is_cuda = self.device.type == "cuda"
        if self.log.profile_tool not in BY_TORCH:
            torch.cuda.cudart().cudaProfilerStart()
            return
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_cuda else [])]
        is_memory = self.log.profile_tool == "memory"
        if is_memory and is_cuda:
            torch.cuda.memory._record_memory_history(max_entries=MOST_ALLOCATIONS)
        self._profile = torch.profiler.profile(activities=activities, profile_memory=is_memory)
        self._profile.start()

    def _stop(self) -> None:
        if self._is_started:
            self._write()
        if self.log.profile_tool in BY_TORCH and dist.is_initialized():
            dist.barrier()  # After the run the traces of all ranks are complete.

    def _write(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        if self.log.profile_tool not in BY_TORCH:
            torch.cuda.cudart().cudaProfilerStop()
            return
        self._profile.stop()
        path = self.folder / f"{self.log.profile_tool}-rank-{self.rank:05d}.json.gz"
        self._written(path, self._profile.export_chrome_trace)
        if self.log.profile_tool == "memory" and self.device.type == "cuda":
            self._written(path.with_name(path.name.replace(".json.gz", ".pickle")), torch.cuda.memory._dump_snapshot)
            torch.cuda.memory._record_memory_history(enabled=None)
        self._profile = None

    def _written(self, path: Path, write: Any) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = files.temporary_beside(path)
        write(str(temporary))
        os.replace(temporary, path)


class NvtxRanges:
    """Ranges for Nsight's tools."""

    @contextmanager
    def around(self, name: str) -> Iterator[None]:
        """The outer range."""
        torch.cuda.nvtx.range_push(name)
        torch.cuda.nvtx.range_push("start")
        try:
            yield
        finally:
            torch.cuda.nvtx.range_pop()
            torch.cuda.nvtx.range_pop()

    def next(self, name: str) -> None:
        """End the open range and begin this one."""
        torch.cuda.nvtx.range_pop()
        torch.cuda.nvtx.range_push(name)


class TorchRanges:
    """Ranges for torch's profiler."""

    def __init__(self) -> None:
        self._open: record_function | None = None

    @contextmanager
    def around(self, name: str) -> Iterator[None]:
        """The outer range."""
        with record_function(name):
            try:
                yield
            finally:
                self._close()

    def next(self, name: str) -> None:
        """End the open range and begin this one."""
        self._close()
        self._open = record_function(name)
        self._open.__enter__()

    def _close(self) -> None:
        if self._open is not None:
            self._open.__exit__(None, None, None)
            self._open = None


def refuse_absent(recipe: Recipe, ranks: int) -> None:
    """Refuse to profile ranks or steps that the run does not have."""
    log = recipe.log
    absent = [rank for rank in log.profile_ranks if rank >= ranks]
    if absent:
        raise UserError(
            f"log.profile_ranks names rank {absent[0]}, but the run has {ranks} ranks, numbered from 0",
            where=recipe.where("log.profile_ranks"),
        )
    if log.profile_tool is not None and log.profile is None:
        raise UserError(
            f"log.profile_tool is {log.profile_tool}, but log.profile is not set",
            where=recipe.where("log.profile_tool"),
            hint="set log.profile to the first and last step, such as [10, 12]",
        )
    if log.profile_tool is not None and log.profile is not None and log.profile[1] > recipe.train.steps:
        raise UserError(
            f"log.profile ends at step {log.profile[1]}, but the run ends at step {recipe.train.steps}: no trace would "
            "be written",
            where=recipe.where("log.profile"),
            hint="choose steps within the run, or increase train.steps",
        )
