"""A thread in each rank that measures stalls of the process and, when steps stop, writes a flight record.

**Stalls.** The thread sleeps for a tenth of a second at a time. If it wakes up later, and the process had no CPU time
meanwhile, the process was stopped (SIGSTOP), swapped out or starved. No counter of the kernel shows this to the process
itself, and peers only see that they wait.

**Flight records.** PyTorch's flight recorder keeps the last collectives of each process group, over NCCL and over gloo
(not gloo's send and recv). If no step ends for several times the usual time, the thread writes what this rank waits for
to `flight/rank-00003.json`:

    {"rank": 3, "host": "b1", "time": 1700000000.0, "step": 120, "groups": [{"name": "mesh_data", "ranks": [1, 3],
      "op": "gloo:all_reduce", "pending": true, "entered": 17, "completed": 16, "since": 1699999970.0}],
      "stack": ["trainer.py:189 _step"]}

`entered` and `completed` count the collectives of the group on this rank; `op` and `since` are those of the first that
has not completed, or else of the last. The recorder is read as JSON, never as a
pickle. A process that is stopped, or whose interpreter is blocked, writes nothing: `steelyard watch` reports that it
did not answer.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from traceback import extract_stack
from typing import Any

import torch.distributed as dist

from steelyard.core import files

FLIGHT = "flight"
TICK = 0.1  # seconds
LEAST_PAUSE = 20.0  # seconds without a step before a flight record is written, and between two
FIRST_PAUSE = 60.0  # before the first step: data is prepared and kernels are compiled
MUCH = 4.0  # times the longest recent step
FRAMES = 8


class Watchdog:
    """Runs while the block runs. The trainer calls `step_done` after every step."""

    def __init__(self, folder: Path, rank: int, is_on: bool) -> None:
        self.path, self.rank, self.is_on = folder / FLIGHT / f"rank-{rank:05d}.json", rank, is_on
        self.stalled = 0.0
        """Seconds that this process did not run although it could have."""
        self._step, self._done, self._longest = 0, time.monotonic(), 0.0
        self._written, self._began = 0.0, time.time()
        self._trained_in = threading.main_thread().ident
        self._over = threading.Event()

    def __enter__(self) -> Watchdog:
        if self.is_on:
            self.path.unlink(missing_ok=True)
            self._trained_in, self._done = threading.get_ident(), time.monotonic()
            threading.Thread(target=self._watch, daemon=True, name="watchdog").start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def step_done(self, step: int) -> None:
        """Note that a step has ended."""
        now = time.monotonic()
        self._longest = max(0.9 * self._longest, now - self._done if self._step else 0.0)
        self._step, self._done = step, now

    def _watch(self) -> None:
        woken, used = time.monotonic(), time.process_time()
        while not self._over.wait(TICK):
            now, cpu = time.monotonic(), time.process_time()
            late = now - woken - TICK - (cpu - used)
            if late > TICK:
                self.stalled += late
            woken, used = now, cpu
            pause = max(LEAST_PAUSE, MUCH * self._longest) if self._step else FIRST_PAUSE
            if now - self._done > pause and now - self._written > pause:
                self._written = now
                with suppress(Exception):  # Diagnosis must not end a run; torch may change what it dumps.
                    files.write_json(self.path, self.record())

    def record(self) -> dict[str, Any]:
        """What this rank waits for."""
        frame = sys._current_frames().get(self._trained_in or 0)
        stack = [] if frame is None else extract_stack(frame)[-FRAMES:]
        return {
            "rank": self.rank,
            "host": socket.gethostname(),
            "time": time.time(),
            "step": self._step,
            "groups": collectives(self._began),
            "stack": [f"{Path(each.filename).name}:{each.lineno} {each.name}" for each in stack],
        }


def collectives(since: float) -> list[dict[str, Any]]:
    """The last collective of each process group on this rank since a time, from PyTorch's flight recorders.

    The recorders outlive process groups, and a new group may have the name of an earlier one.
    """
    from torch._C import _distributed_c10d as c10d

    groups: dict[str, dict[str, Any]] = {}
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):  # gloo's recorder, and NCCL's own
        dump = getattr(c10d, name, None)
        for entry in json.loads(dump() or "{}").get("entries", []) if dump is not None else ():
            if entry.get("is_p2p") or entry["time_created_ns"] < 1e9 * since:
                continue
            group, described = entry["process_group"][:2]
            key = f"{group} {entry['profiling_name'].partition(':')[0]}"
            found = groups.setdefault(key, {"name": described, "ranks": _ranks_of(group), "entered": 0, "completed": 0})
            number, pending = entry["collective_seq_id"], not entry.get("retired")
            # On a GPU the host enqueues later collectives: the first that has not completed is the one that hangs.
            if not found.get("pending"):
                found |= {"op": entry["profiling_name"], "since": entry["time_created_ns"] / 1e9, "pending": pending}
            found["entered"] = max(found["entered"], number)
            if not pending:
                found["completed"] = max(found["completed"], number)
    return list(groups.values())


def _ranks_of(name: str) -> list[int]:
    """The ranks of a process group, which the recorder of gloo does not know. Torch has no public list of groups."""
    world = dist.distributed_c10d._world
    for group, known in world.pg_names.items():
        if known == name:
            return sorted(world.pg_group_ranks[group])
    return []
