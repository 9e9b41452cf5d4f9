"""Memory checkpoints (`checkpoint.memory_every`): the state in host memory, and a copy of it on another node.

`save` starts the copies to pinned host memory (`host_staging.py`) and returns. A thread then writes them to the node's
folder in tmpfs (`memory_folder.py`), sends the files to a peer on another node (`peer_copy.py`), and completes the
memory checkpoint with `state.json` when all ranks have done so. `memory_restore.py` reads it after a restart.

A memory checkpoint that cannot be stored never ends a run: it goes on with checkpoints on disk only, and says so.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from steelyard.checkpoint import memory_folder, state_file, step_folders
from steelyard.checkpoint.finite import listed, nonfinite
from steelyard.checkpoint.folder import write_shards
from steelyard.checkpoint.host_staging import HostStaging
from steelyard.checkpoint.peer_copy import FileInfo, Nodes, exchange
from steelyard.checkpoint.sharded_tensor import TensorShard
from steelyard.core import units
from steelyard.core.console import console
from steelyard.core.errors import RuntimeFailure
from steelyard.parallel.world import World

METADATA = ".metadata"


class MemorySaver:
    """Stores memory checkpoints of a run, one at a time. Construction, `is_ready` and `save` are collective calls."""

    def __init__(self, root: Path, world: World, device_bytes: int = 0) -> None:
        self.world, self.nodes = world, Nodes.of(world)
        self.folder = root / f"node-{self.nodes.number_on_host}"
        self.staging = HostStaging(device_bytes)
        self.newest: tuple[int, Path] | None = None
        """The step and the folder of the newest complete memory checkpoint."""
        # A separate group, because training communicates at the same time.
        self._group = dist.new_group(backend="gloo") if world.size > 1 else None
        self._thread: threading.Thread | None = None
        self._is_off = False
        self._has_buffers = False
        self._has_skipped = False
        if world.rank == self.nodes.leader and self.nodes.number_on_host == 0:
            memory_folder.remove(root)  # What earlier attempts left: it is restored, or older than what is on disk.
        problems = self._gathered(self._made())
        self._off(next(filter(None, problems), None))
        if len(self.nodes.ranks) == 1 and not self._is_off:
            self._say(
                "memory checkpoints: there is one node, so no peer holds a copy; they survive the loss of a rank, "
                "not of the node"
            )

    def _made(self) -> str | None:
        """Create the folder of this node; returns why that is not possible."""
        try:
            memory_folder.make_private(self.folder.parent)
            self.folder.mkdir(exist_ok=True)
        except OSError as error:
            return f"{error.filename or self.folder}: {error.strerror or error}"
        return None

    def is_ready(self) -> bool:
        """Whether all ranks can start the next memory checkpoint: none is off or still stores the previous one."""
        is_off, is_busy = self._agreed(self._is_off, self._thread is not None and self._thread.is_alive())
        if is_busy and not is_off and not self._has_skipped:
            self._has_skipped = True
            self._say(
                "a memory checkpoint takes longer than checkpoint.memory_every steps, so some are skipped", is_bad=True
            )
        return not (is_off or is_busy)

    def _agreed(self, *flags: bool) -> list[bool]:
        """Which flags any rank has. Over the group of the training, in its thread."""
        tensor = torch.tensor(flags, dtype=torch.int32)
        if self.world.size > 1:
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return [bool(flag) for flag in tensor]

    def save(self, shards: dict[str, TensorShard], state: dict[str, Any]) -> None:
        """Copy the current values and store them in the background. Only after `is_ready`."""
        copies: dict[str, TensorShard] = {}
        try:
            if not self._has_buffers:
                self._require_on_host(memory_folder.require_memory, sum(each.tensor.nbytes for each in shards.values()))
            self._has_buffers = True
            copies, problem = self.staging.copy(shards), None
        except OSError as error:  # There is too little host memory.
            problem = error.strerror or str(error)
        # After an error, a thread that waits for a lost rank must not keep the process.
        self._thread = threading.Thread(
            target=self._store, args=(copies, state, problem), name="memory checkpoint", daemon=self.world.size > 1
        )
        self._thread.start()

    def let_end(self) -> None:
        """Wait for a memory checkpoint in progress."""
        if self._thread is not None:
            self._thread.join()

    def remove(self) -> None:
        """Remove all memory checkpoints at the end of the run."""
        self.let_end()
        self._agreed(True)  # No rank of this node writes any more.
        if self.world.rank == self.nodes.leader:
            memory_folder.remove(self.folder)

    def _store(self, copies: dict[str, TensorShard], state: dict[str, Any], problem: str | None) -> None:
        try:
            self.staging.wait()
            problem = problem or self._why_not_finite(copies)
            if self.world.rank == self.nodes.leader:
                memory_folder.remove_oldest(self.folder)
            problem = next(filter(None, self._gathered(problem)), None) or self._written(copies, state)
        except Exception as error:  # Another rank has probably exited: the older ones are needed now.
            self._is_off = True
            reason = str(error).strip() or type(error).__name__
            self._say(f"the memory checkpoint of step {state['step']} is not stored: {reason.splitlines()[0]}", True)
            return
        if problem is None:
            self.newest = state["step"], self.folder
            return
        self._off(problem)
        self.newest = None
        if self.world.rank == self.nodes.leader:
            memory_folder.remove(self.folder)

    def _why_not_finite(self, copies: dict[str, TensorShard]) -> str | None:
        names = nonfinite({name: shard.tensor for name, shard in copies.items()})
        return f"NaN or infinite values in {listed(names)}" if names else None

    def _written(self, copies: dict[str, TensorShard], state: dict[str, Any]) -> str | None:
        """Write the files of this rank and of the ranks whose peer it is. Returns the first problem of any rank."""
        path = step_folders.path_at(self.folder, state["step"])
        try:
            make_writer = partial(memory_folder.MemoryWriter, require_room=self._require_room)
            sums = write_shards(copies, path, path, self._group, make_writer)
        except RuntimeFailure as error:
            return error.message  # The same on all ranks.
        sums_of = self._gathered(sums)
        problem = self._share_metadata(path)
        if self._group is not None:
            own = [FileInfo(name, (path / name).stat().st_size, sums[name]) for name in sums if name != METADATA]
            files, rank = self._gathered(own), self.world.rank
            try:
                self._require_room(
                    path, sum(each.size for source in self.nodes.sources(rank) for each in files[source])
                )
            except OSError as error:
                return error.strerror or str(error)  # The same on all ranks.
            problem = exchange(path, files, self.nodes, rank, self._group) or problem
        problem = next(filter(None, self._gathered(problem)), None)
        if problem is None and self.world.rank == self.nodes.leader:
            problem = self._completed(path, state, {name: each for sums in sums_of for name, each in sums.items()})
        return next(filter(None, self._gathered(problem)), None)

    def _require_room(self, folder: Path, size: int) -> None:
        self._require_on_host(partial(memory_folder.require_room, folder), size)

    def _require_on_host(self, require: Callable[[int], None], size: int) -> None:
        """Raise OSError on all ranks if what the ranks of some host add together does not fit there.

        A collective call: no rank starts to write before all have compared.
        """
        sizes, problem = self._gathered(size), None
        try:
            require(sum(sizes[rank] for rank in self.nodes.on_host))
        except OSError as error:
            problem = error.strerror or str(error)
        problem = next(filter(None, self._gathered(problem)), None)
        if problem is not None:
            raise OSError(errno.ENOMEM, problem)

    def _share_metadata(self, path: Path) -> str | None:
        """Write torch's metadata, which rank 0 has written on its node, on the other nodes."""
        content = [(path / METADATA).read_bytes() if self.world.is_rank0 else None]
        if self._group is not None:
            dist.broadcast_object_list(content, src=0, group=self._group)
        if self.nodes.own == 0 or self.world.rank != self.nodes.leader:
            return None
        assert content[0] is not None
        try:
            path.mkdir(exist_ok=True)
            (path / METADATA).write_bytes(content[0])
        except OSError as error:
            return error.strerror or str(error)
        return None

    def _completed(self, path: Path, state: dict[str, Any], sums: dict[str, str]) -> str | None:
        try:
            state_file.write(path, state, sums)
        except OSError as error:
            return error.strerror or str(error)
        return None

    def _off(self, problem: str | None) -> None:
        """Store nothing more if there is a problem, which is the same on all ranks."""
        if problem is None:
            return
        self._is_off = True
        size = f" ({units.size(self.staging.size)} of state on this rank)" if self.staging.size else ""
        self._say(
            f"memory checkpoints are off: {problem}{size}; the run goes on with checkpoints on disk only", is_bad=True
        )

    def _say(self, text: str, is_bad: bool = False) -> None:
        if self.world.is_rank0:
            (console.warn if is_bad else console.say)(text)

    def _gathered(self, value: Any) -> list[Any]:
        """The values of all ranks, over the separate group."""
        gathered: list[Any] = [value] * self.world.size
        if self._group is not None:
            dist.all_gather_object(gathered, value, group=self._group)
        return gathered
