"""Copies of a rank's files on another node, sent over gloo in chunks while training continues."""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch
import torch.distributed as dist
from torch import Tensor

from steelyard.parallel.world import World

CHUNK = 32 << 20  # bytes


@dataclass(frozen=True)
class FileInfo:
    """A file of a rank, as its peer receives it."""

    name: str
    size: int
    checksum: str


@dataclass(frozen=True)
class Nodes:
    """The nodes of a job, as lists of ranks, ordered by their first rank."""

    ranks: list[list[int]]
    own: int
    """The node of this rank."""
    number_on_host: int
    """0, except for nodes that are simulated on one host."""
    on_host: tuple[int, ...] = ()
    """The ranks that share the memory of this host."""
    hosts: tuple[str, ...] = ()
    """The host of each rank."""

    @classmethod
    def of(cls, world: World) -> Nodes:
        """A collective call. Ranks of a host with the same local rank belong to simulated nodes of that host."""
        place = socket.gethostname(), world.local_rank
        places: list[tuple[str, int]] = [place] * world.size
        if world.size > 1:
            dist.all_gather_object(places, place)
        nodes: dict[tuple[str, int], list[int]] = {}
        own = ("", 0)
        for rank, (host, local_rank) in enumerate(places):
            node = host, sum(place == (host, local_rank) for place in places[:rank])
            nodes.setdefault(node, []).append(rank)
            own = node if rank == world.rank else own
        on_host = tuple(rank for rank, (host, _) in enumerate(places) if host == places[world.rank][0])
        hosts = tuple(host for host, _ in places)
        return cls(list(nodes.values()), list(nodes).index(own), own[1], on_host, hosts)

    @property
    def leader(self) -> int:
        """The rank that writes files for this node."""
        return self.ranks[self.own][0]

    def peer(self, rank: int) -> int | None:
        """The rank on the next node that receives the files of a rank; None if there is one node."""
        node = next(number for number, ranks in enumerate(self.ranks) if rank in ranks)
        other = self.ranks[(node + 1) % len(self.ranks)]
        return None if len(self.ranks) == 1 else other[self.ranks[node].index(rank) % len(other)]

    def sources(self, rank: int) -> list[int]:
        """The ranks whose files a rank receives."""
        return [each for ranks in self.ranks for each in ranks if self.peer(each) == rank]


def exchange(folder: Path, files: list[list[FileInfo]], nodes: Nodes, rank: int, group: dist.ProcessGroup) -> str:
    """Send this rank's files to its peer and receive those of others. Returns what went wrong here, or "".

    `files` has the files of each rank. Every rank sends and receives chunk number n before chunk n + 1, so no two wait
    for each other. After an error of its own disk a rank still receives, since others would wait for it.
    """
    peer = nodes.peer(rank)
    outgoing = _outgoing(folder, files[rank]) if peer is not None else iter(())
    incoming = {source: _Receiver(folder, files[source]) for source in nodes.sources(rank)}
    problem = ""
    while True:
        requests: list[dist.Work | None] = []
        chunk = next(outgoing, None)
        if chunk is not None:
            requests.append(dist.isend(chunk, dst=peer, group=group))
        receiving = [(receiver, receiver.buffer(), source) for source, receiver in incoming.items()]
        requests += [dist.irecv(buffer, src=source, group=group) for _, buffer, source in receiving if buffer.numel()]
        if not requests:
            break
        for request in requests:
            assert request is not None
            request.wait()
        for receiver, buffer, _ in receiving:
            receiver.take(buffer)
    for receiver in incoming.values():
        problem = problem or receiver.problem
    return problem


def _outgoing(folder: Path, files: list[FileInfo]) -> Iterator[Tensor]:
    for each in files:
        content = torch.from_file(str(folder / each.name), shared=False, size=each.size, dtype=torch.uint8)
        yield from content.split(CHUNK)


class _Receiver:
    """Writes the chunks of a rank's files, and compares their checksums."""

    def __init__(self, folder: Path, files: list[FileInfo]) -> None:
        self.folder, self.files, self.problem = folder, list(files), ""
        self._left = self.files[0].size if self.files else 0
        self._file: IO[bytes] | None = None
        self._digest = hashlib.sha256()

    def buffer(self) -> Tensor:
        """A buffer for the next chunk; empty after the last."""
        return torch.empty(min(CHUNK, self._left), dtype=torch.uint8)

    def take(self, chunk: Tensor) -> None:
        """Write a chunk."""
        if not chunk.numel():
            return
        content, current = chunk.numpy().data, self.files[0]
        self._left -= len(content)
        try:
            if self._file is None and not self.problem:
                self._file = open(self.folder / current.name, "wb")  # noqa: SIM115
            if self._file is not None:
                self._file.write(content)
                self._digest.update(content)
        except OSError as error:
            self._fail(error.strerror or str(error))
        if self._left == 0:
            self._finish(current)

    def _finish(self, current: FileInfo) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
            if self._digest.hexdigest() != current.checksum:
                self._fail(f"{current.name} arrived with another checksum")
        self._digest = hashlib.sha256()
        self.files.pop(0)
        self._left = self.files[0].size if self.files else 0

    def _fail(self, problem: str) -> None:
        self.problem = self.problem or problem
        if self._file is not None:
            with suppress(OSError):  # It tries to write what is buffered.
                self._file.close()
            self._file = None
