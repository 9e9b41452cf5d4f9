"""Restore the newest memory checkpoint that the nodes of an attempt still hold.

Every node reports which files it has, of its own ranks and of the ranks whose peers its ranks were. If all files of a
memory checkpoint are there, the nodes copy them into the run folder, compare their checksums, and rank 0 makes them an
ordinary checkpoint. So any layout can load it. A file that is damaged on one node is taken from another one; if there
is none, the previous memory checkpoint is tried.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from steelyard.checkpoint import memory_folder, state_file, step_folders
from steelyard.checkpoint.folder import Checkpoint, unfinished_folder
from steelyard.checkpoint.memory_folder import MemoryCheckpoint
from steelyard.core.console import console
from steelyard.core.errors import SteelyardError
from steelyard.parallel.world import World

THREADS = 4
LONGEST_COPY = timedelta(hours=6)  # of all state into the run folder; a lost node ends the attempt earlier
Key = tuple[int, str]


class _Peers(NamedTuple):
    """The ranks of the attempt, in a group whose timeout is longer than any copy takes."""

    world: World
    group: dist.ProcessGroup | None

    def gathered(self, value: Any) -> list[Any]:
        """The values of all ranks."""
        values: list[Any] = [value] * self.world.size
        if self.group is not None:
            dist.all_gather_object(values, value, group=self.group)
        return values

    def from_rank0(self, value: str) -> str:
        """The value of rank 0."""
        values = [value]
        if self.group is not None:
            dist.broadcast_object_list(values, src=0, group=self.group)
        return values[0]


class _Report(NamedTuple):
    """What a node holds: the files by memory checkpoint, their states and checksums, and unusable ones."""

    names: dict[Key, list[str]]
    contents: dict[Key, tuple[dict[str, Any], dict[str, str]]]
    problems: list[str]


class _NotRestorable(Exception):
    """Files of a memory checkpoint are missing or damaged on all nodes. Raised on all ranks."""


def restore(root: Path, checkpoints: Path, newer_than: int, world: World) -> Checkpoint | None:
    """The newest restorable memory checkpoint after a step, written as a checkpoint of the run; None if there is none.

    A collective call at the start of an attempt, with any number of ranks and nodes. `root` is the folder of the run
    on every node, `checkpoints` is in the run folder, which all nodes share.
    """
    peers = _Peers(world, dist.new_group(backend="gloo", timeout=LONGEST_COPY) if world.size > 1 else None)
    held: dict[Key, MemoryCheckpoint] = {}
    report = _Report({}, {}, [])
    if world.local_rank == 0:
        found, problems = memory_folder.found_in(root)
        held = {one.key: one for one in found if one.step > newer_than}
        names = {key: sorted(one.paths) for key, one in held.items()}
        report = _Report(names, {key: (one.state, one.sums) for key, one in held.items()}, problems)
    reports = [_Report(*each) for each in peers.gathered(tuple(report))]
    contents = {key: content for each in reports for key, content in each.contents.items()}
    for problem in dict.fromkeys(problem for each in reports for problem in each.problems):
        _warn(problem, world)
    for key in sorted(contents, reverse=True):
        state, sums = contents[key]
        holders = {
            name: [rank for rank, each in enumerate(reports) if name in each.names.get(key, ())] for name in sums
        }
        path = step_folders.path_at(checkpoints, key[0])
        try:
            with _shared_folder(path, peers) as unfinished:
                _copy_all(unfinished, holders, sums, held.get(key), peers)
                _write_state(unfinished, state, sums, peers)
            peers.gathered(None)  # Rank 0 has renamed the folder.
        except _NotRestorable as reason:
            _warn(f"the memory checkpoint of step {key[0]} cannot be restored: {reason}", world)
            continue
        return Checkpoint(path, state)
    return None


def _copy_all(
    unfinished: Path, holders: dict[str, list[int]], sums: dict[str, str], held: MemoryCheckpoint | None, peers: _Peers
) -> None:
    """Copy every file from a rank that holds it. After a failure the next holder tries."""
    left = {name: list(ranks) for name, ranks in holders.items()}
    reasons: dict[str, str] = {}
    while left:
        missing = next((name for name, ranks in sorted(left.items()) if not ranks), None)
        if missing is not None:
            raise _NotRestorable(reasons.get(missing, f"no node that is alive holds {missing}"))
        load = dict.fromkeys(range(peers.world.size), 0)
        mine = []
        for name, ranks in sorted(left.items()):
            chosen = min(ranks, key=lambda rank: load[rank])
            load[chosen] += 1
            ranks.remove(chosen)
            mine += [name] if chosen == peers.world.rank else []
        outcome = _copy(unfinished, mine, sums, held)
        for each in peers.gathered(outcome):
            for name, reason in each.items():
                if reason is None:
                    left.pop(name)
                else:
                    reasons[name] = reason


def _copy(
    unfinished: Path, names: list[str], sums: dict[str, str], held: MemoryCheckpoint | None
) -> dict[str, str | None]:
    """Copy files of this node; returns by name why a file was not copied, or None."""

    def copied(name: str) -> str | None:
        assert held is not None
        reason = None
        for path in held.paths[name]:
            try:
                memory_folder.copy_verified(path, unfinished / name, sums[name])
            except SteelyardError as error:
                reason = error.message
            except OSError as error:
                reason = f"{name}: {error.strerror or error}"
            else:
                return None
        return reason

    with ThreadPoolExecutor(THREADS) as pool:
        return dict(zip(names, pool.map(copied, names), strict=True))


def _write_state(unfinished: Path, state: dict[str, Any], sums: dict[str, str], peers: _Peers) -> None:
    problem = None
    if peers.world.is_rank0:
        try:
            state_file.write(unfinished, state, sums)
        except OSError as error:
            problem = f"{state_file.NAME}: {error.strerror or error}"
    problem = peers.gathered(problem)[0]
    if problem is not None:
        raise _NotRestorable(problem)


@contextlib.contextmanager
def _shared_folder(path: Path, peers: _Peers) -> Iterator[Path]:
    """A temporary folder that all ranks write to, and that rank 0 renames to `path`."""
    with unfinished_folder(path) if peers.world.is_rank0 else contextlib.nullcontext(path) as own:
        yield Path(peers.from_rank0(str(own)))


def _warn(message: str, world: World) -> None:
    if world.is_rank0:
        console.warn(message)
