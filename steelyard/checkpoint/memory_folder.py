"""Memory checkpoints of a run on a node: files in host memory (tmpfs), which outlive the processes of the run.

    /dev/shm/steelyard-<id of the run>/node-0/step-00000040/
        __<rank>_0.distcp   shards of the ranks of this node, and copies of those of ranks on another node
        .metadata           as in a checkpoint on disk, on every node
        state.json          the same, written last: a folder without it is incomplete

So a memory checkpoint is a checkpoint (`folder.py`) whose files are spread over the nodes. A node keeps two of them.
Ranks that simulate several nodes on one host have `node-0`, `node-1` and so on. Only the owner can open the folder.
"""

from __future__ import annotations

import errno
import hashlib
import math
import os
import re
import shutil
import stat
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.futures import Future

from steelyard.checkpoint import state_file, step_folders
from steelyard.checkpoint.dcp_metadata import PortableWriter
from steelyard.core import host, units
from steelyard.core.errors import RuntimeFailure, SteelyardError
from steelyard.core.run import Run

ID = "id"
NAME = "steelyard-[0-9a-f]{16}"
KEPT_CHECKPOINTS = 2
RESERVE = 1 << 30  # Host memory that a memory checkpoint leaves free.


@dataclass(frozen=True)
class MemoryCheckpoint:
    """The part of a memory checkpoint that a node holds."""

    step: int
    state: dict[str, Any]
    sums: dict[str, str]
    """The SHA-256 of every file of the whole checkpoint."""
    paths: dict[str, list[Path]]
    """The files on this host: more than one of a name if it simulates several nodes."""

    @property
    def key(self) -> tuple[int, str]:
        """Equal on two nodes if they hold parts of the same checkpoint, and not of two attempts at the same step."""
        text = repr((sorted(self.sums.items()), sorted(self.state.items())))
        return self.step, hashlib.sha256(text.encode()).hexdigest()


def set_id(run: Run) -> None:
    """Give a run an id, if it has none."""
    if ID not in run.manifest():
        run.update(**{ID: uuid.uuid4().hex})


def root_of(run: Run, memory_dir: str) -> Path | None:
    """The folder of a run on every node; None if the run has no id. Only rank 0 needs to read the run folder.

    The name depends on the id and the path, so that neither a new run at this path nor a copy of the folder uses it.
    """
    own = run.manifest().get(ID)
    name = hashlib.sha256(f"{own} {run.path.resolve()}".encode()).hexdigest()[:16]
    return None if own is None else Path(memory_dir) / f"steelyard-{name}"  # as in NAME


def make_private(root: Path) -> None:
    """Create the folder of a run for its owner alone; raise OSError if that is not possible."""
    with suppress(FileExistsError):
        root.mkdir(mode=0o700)
    if not _is_private(root):
        raise PermissionError(errno.EPERM, "it exists and is not private", str(root))


def _is_private(root: Path) -> bool:
    found = root.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077


def remove(folder: Path) -> None:
    """Remove a folder, and its parent if that is empty then."""
    shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):
        if folder.name.startswith("node-"):
            folder.parent.rmdir()


def remove_stale(root: Path) -> None:
    """Remove the folder that an earlier attempt recorded, if it is one of this user's memory checkpoints."""
    with suppress(OSError):
        if re.fullmatch(NAME, root.name) and _is_private(root):
            shutil.rmtree(root, ignore_errors=True)


def remove_oldest(node: Path) -> None:
    """Keep the newest complete memory checkpoint, so that there are two when the next one is complete."""
    kept = 0
    for path in reversed(step_folders.by_age(node)):
        if not (path / state_file.NAME).exists() or kept >= KEPT_CHECKPOINTS - 1:
            shutil.rmtree(path, ignore_errors=True)
        else:
            kept += 1


def found_in(root: Path) -> tuple[list[MemoryCheckpoint], list[str]]:
    """The memory checkpoints of this host, and why others are not usable. Checksums of files are not compared yet."""
    found: dict[tuple[int, str], MemoryCheckpoint] = {}
    problems: list[str] = []
    with suppress(FileNotFoundError):
        if not _is_private(root):  # Others could have written it.
            return [], [f"{root} is not private, so its memory checkpoints are not used"]
    for node in sorted(root.glob("node-*")):
        for path in step_folders.by_age(node):
            if not (path / state_file.NAME).exists():
                continue  # The run was stopped while it was being written.
            try:
                state, sums = state_file.read(path)
            except SteelyardError as error:
                problems.append(error.message)
                continue
            one = MemoryCheckpoint(int(state["step"]), state, sums, {})
            paths = found.setdefault(one.key, one).paths
            for name in sums:
                if (path / name).is_file():
                    paths.setdefault(name, []).append(path / name)
    return list(found.values()), problems


def require_memory(size: int) -> None:
    """Raise OSError if the node has no free memory of this size."""
    available = host.available_bytes()
    if available is not None and size > available - RESERVE:
        raise OSError(errno.ENOMEM, f"a memory checkpoint needs {units.size(size)}, the node has {_left(available)}")


def require_room(folder: Path, size: int) -> None:
    """Raise OSError if files of this size do not fit into the folder or into the memory of the node."""
    require_memory(size)
    while not folder.exists():
        folder = folder.parent
    space = os.statvfs(folder)
    free = space.f_bavail * space.f_frsize
    if size > free:
        message = f"a memory checkpoint needs {units.size(size)}, {folder} has {units.size(free)}"
        raise OSError(errno.ENOSPC, message)


def _left(available: int) -> str:
    return units.size(max(0, available - RESERVE))


class MemoryWriter(PortableWriter):
    """Writes shards only if there is room for all of them: a full tmpfs would take the memory of the training.

    `require_room` gets the folder and the bytes of this rank, and raises an OSError if they do not fit.
    """

    def __init__(self, path: str, require_room: Callable[[Path, int], None], **options: Any) -> None:
        super().__init__(path, **options)
        self.require_room = require_room

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[Any]:
        """Write the shards of a plan, from which shards that another rank writes are removed."""
        sizes = [item.tensor_data for item in plan.items if item.tensor_data is not None]
        size = sum(math.prod(data.chunk.sizes) * data.properties.dtype.itemsize for data in sizes)
        self.require_room(Path(self.path), size)
        return super().write_data(plan, planner)


def copy_verified(source: Path, target: Path, expected: str) -> None:
    """Copy a file; raise if it does not have the expected checksum."""
    digest = hashlib.sha256()
    with open(source, "rb") as read, open(target, "wb") as written:
        while block := read.read(1 << 24):
            digest.update(block)
            written.write(block)
        written.flush()
        os.fsync(written.fileno())
    if digest.hexdigest() != expected:
        target.unlink()
        raise RuntimeFailure(f"{source.name} does not match its checksum")
