"""Brings each weight matrix to one rank and its result back to all ranks that hold a part of it.

An update that needs a whole matrix, such as Muon's, is computed once per matrix among the ranks of a pipeline stage.
The matrices are spread over these ranks by their cost. Any form of sharding is a box per rank: FSDP shards rows or
experts, tensor parallelism rows or columns, expert parallelism experts; with replicas several ranks hold the same box.
An all-to-all moves the boxes to the owners, another one returns the results. The plan is made once.

A parameter is a stack of matrices (n, rows, columns), with n = 1 unless it has experts. A unit is a run of consecutive
matrices of a stack that have one owner. Units are exchanged in rounds, which bounds the memory for buffers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from steelyard.parallel.mesh import MeshAxis
from steelyard.parallel.param_shards import ParamShard

ROUND_ELEMENTS = 1 << 26  # of the matrices that a rank owns in a round, on average


class Box(NamedTuple):
    """A part of a stack: the first index along each dimension, and the length."""

    start: tuple[int, int, int]
    shape: tuple[int, int, int]

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    def slices(self, origin: int) -> tuple[slice, slice, slice]:
        """The index of this part in a stack whose first matrix has the number `origin`."""
        matrix, row, column = self.start
        matrix -= origin
        count, rows, columns = self.shape
        return slice(matrix, matrix + count), slice(row, row + rows), slice(column, column + columns)


@dataclass
class Unit:
    """Consecutive matrices of a parameter, and the ranks that hold, send, compute and receive them."""

    param: int
    first: int
    shape: tuple[int, int, int]
    boxes: dict[int, Box]
    """The part that each rank holds."""
    owner: int = 0
    sources: frozenset[int] = frozenset()
    """The ranks that send their part: one of those with the same part."""


class HeldPiece(NamedTuple):
    """The elements of this rank's tensor of a parameter that belong to a unit."""

    param: int
    start: int
    stop: int
    is_sent: bool
    """Whether the owner takes the input from this rank, and not from another one with the same elements."""


class Round:
    """The units of one exchange, as this rank sees them."""

    def __init__(self, units: list[Unit], stage: MeshAxis, starts: list[int]) -> None:
        self.stage = stage
        ranks, me = range(stage.size), stage.index
        units = sorted(units, key=lambda unit: (unit.owner, unit.shape[1:]))  # stable
        owned = [unit for unit in units if unit.owner == me]
        self.batches = [
            (sum(unit.shape[0] for unit in same), *shape)
            for shape, same in groupby(owned, key=lambda unit: unit.shape[1:])
        ]
        held = [unit for unit in units if me in unit.boxes]
        self.held = [_held(unit, me, starts[unit.param]) for unit in held]
        places = dict(zip(map(id, owned), _places(owned), strict=True))
        inputs = [(source, unit) for source in ranks for unit in owned if source in unit.sources]
        outputs = [(target, unit) for target in ranks for unit in owned if target in unit.boxes]
        self.received = [(*places[id(unit)], unit.boxes[source], unit.first) for source, unit in inputs]
        self.returned = [(*places[id(unit)], unit.boxes[target], unit.first) for target, unit in outputs]
        self.send_sizes = [
            _size(me, (unit for unit in held if unit.owner == to and me in unit.sources)) for to in ranks
        ]
        self.receive_sizes = [_size(of, (unit for source, unit in inputs if source == of)) for of in ranks]
        self.return_sizes = [_size(to, (unit for target, unit in outputs if target == to)) for to in ranks]
        self.result_sizes = [_size(me, (unit for unit in held if unit.owner == of)) for of in ranks]
        self.is_local = all(unit.sources == {unit.owner} for unit in units)
        """Whether every owner holds its matrices already."""

    def gather(self, sent: Tensor) -> list[Tensor]:
        """The stacks of matrices that this rank owns, one for each shape, from the pieces that all ranks send."""
        if self.is_local:
            sizes = [math.prod(shape) for shape in self.batches]
            return [flat.view(shape) for flat, shape in zip(sent.split(sizes), self.batches, strict=True)]
        received = self._all_to_all(sent, self.send_sizes, self.receive_sizes)
        batches = [sent.new_empty(shape) for shape in self.batches]
        boxes = received.split([box.size for _, _, box, _ in self.received])
        for (batch, at, box, first), values in zip(self.received, boxes, strict=True):
            batches[batch][box.slices(first - at)] = values.view(box.shape)
        return batches

    def scatter(self, batches: list[Tensor], like: Tensor) -> list[Tensor]:
        """The result of each held piece, flat, from the stacks of all owners; `like` has the dtype and device."""
        boxes = [batches[batch][box.slices(first - at)].reshape(-1) for batch, at, box, first in self.returned]
        if self.stage.size == 1:
            return boxes
        results = self._all_to_all(
            torch.cat(boxes) if boxes else like.new_empty(0), self.return_sizes, self.result_sizes
        )
        return list(results.split([piece.stop - piece.start for piece in self.held]))

    def _all_to_all(self, sent: Tensor, send_sizes: list[int], receive_sizes: list[int]) -> Tensor:
        received = sent.new_empty(sum(receive_sizes))
        dist.all_to_all_single(received, sent, receive_sizes, send_sizes, group=self.stage.group)
        return received


def plan_rounds(
    shards: list[ParamShard], stage: MeshAxis, cost: Callable[[int, int], float], limit: int = ROUND_ELEMENTS
) -> list[Round]:
    """The rounds that exchange these parameters. `cost` is that of a matrix with some rows and columns.

    All ranks of the stage must call this with the same parameters, of which they may hold nothing.
    """
    own = [_box(shard) for shard in shards]
    all_boxes = [own]
    if stage.size > 1:
        all_boxes = [own] * stage.size
        dist.all_gather_object(all_boxes, own, group=stage.group)
    shapes = [_stacked(shard.shape) for shard in shards]
    units = [unit for param, shape in enumerate(shapes) for unit in _units(param, shape, all_boxes)]
    units.sort(key=lambda unit: (-unit.shape[0] * cost(*unit.shape[1:]), unit.shape[1:]))
    _assign(units, [unit.shape[0] * cost(*unit.shape[1:]) for unit in units], stage.size)
    starts = [box.start[0] for box in own]
    return [Round(part, stage, starts) for part in _split(units, limit * stage.size)]


def _stacked(shape: tuple[int, ...]) -> tuple[int, int, int]:
    first, rows, columns = (1,) * (3 - len(shape)) + tuple(shape)
    return first, rows, columns


def _box(shard: ParamShard) -> Box:
    start = (0,) * (3 - len(shard.shape)) + tuple(shard.offset)
    return Box((start[0], start[1], start[2]), _stacked(tuple(shard.tensor.shape)))


def _units(param: int, shape: tuple[int, int, int], all_boxes: list[list[Box]]) -> Iterator[Unit]:
    """Split a stack where the share of a rank begins, and into at least as many units as ranks if it can be."""
    count, rows, columns = shape
    boxes = {rank: box for rank, each in enumerate(all_boxes) if (box := each[param]).size}
    edges = {count, *range(0, count, -(-count // len(all_boxes)))}
    edges |= {edge for box in boxes.values() for edge in (box.start[0], box.start[0] + box.shape[0])}
    for first, end in pairwise(sorted(edges)):
        parts = {
            rank: Box((first, *box.start[1:]), (end - first, *box.shape[1:]))
            for rank, box in boxes.items()
            if box.start[0] <= first < box.start[0] + box.shape[0]
        }
        yield Unit(param, first, (end - first, rows, columns), parts)


def _assign(units: list[Unit], costs: list[float], ranks: int) -> None:
    """Give each unit, the most expensive first, to the least loaded rank that holds a part, or to another one.

    Of ranks that hold the same part, the one next to the owner sends it.
    """
    loads, fair = [0.0] * ranks, sum(costs) / ranks
    for unit, cost in zip(units, costs, strict=True):
        unit.owner = min(unit.boxes, key=lambda rank: (loads[rank], rank))
        if loads[unit.owner] + cost > fair:
            unit.owner = min(range(ranks), key=lambda rank: (loads[rank], rank not in unit.boxes, rank))
        loads[unit.owner] += cost
        nearest: dict[Box, int] = {}
        for rank, box in unit.boxes.items():
            if box not in nearest or abs(rank - unit.owner) < abs(nearest[box] - unit.owner):
                nearest[box] = rank
        unit.sources = frozenset(nearest.values())


def _split(units: list[Unit], limit: int) -> Iterator[list[Unit]]:
    """Consecutive units of at most `limit` elements, or one larger unit."""
    part: list[Unit] = []
    total = 0
    for unit in units:
        size = math.prod(unit.shape)
        if part and total + size > limit:
            yield part
            part, total = [], 0
        part.append(unit)
        total += size
    if part:
        yield part


def _places(owned: list[Unit]) -> Iterator[tuple[int, int]]:
    """Of each unit, the number of its batch and of its first matrix there."""
    for batch, (_, same) in enumerate(groupby(owned, key=lambda unit: unit.shape[1:])):
        at = 0
        for unit in same:
            yield batch, at
            at += unit.shape[0]


def _held(unit: Unit, rank: int, first: int) -> HeldPiece:
    """The piece of a rank, whose tensor begins with the matrix number `first`."""
    box = unit.boxes[rank]
    matrix = box.shape[1] * box.shape[2]
    start = (unit.first - first) * matrix
    return HeldPiece(unit.param, start, start + box.size, rank in unit.sources)


def _size(rank: int, units: Iterator[Unit]) -> int:
    return sum(unit.boxes[rank].size for unit in units)
