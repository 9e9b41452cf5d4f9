"""Pipeline ranks and links with the same cost: each kind has a number, and a value is computed once for each number."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any, TypeVar

from steelyard.planning.cluster import Cluster, Placement
from steelyard.planning.layout import Layout, Seat, Seats, link_kinds, seat_kinds

T = TypeVar("T")


@dataclass(frozen=True)
class StagePlacement:
    """The seats of each pipeline rank, with a number for each set of ranks, or of links, that have the same cost."""

    seats: list[tuple[Seat, ...]]
    kinds: list[int]
    links: list[int]

    @cached_property
    def runs(self) -> list[tuple[int, int, int]]:
        """Neighbours of the same kind and with the same link to the next rank: kind, one of them, and their number."""
        found, rank = [], 0
        for (kind, _), same in groupby(zip(self.kinds, self.links, strict=True)):
            number = len(list(same))
            found.append((kind, rank, number))
            rank += number
        return found


class RankKinds:
    """The kinds of ranks and links of all layouts on one cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._seats: dict[Placement, Seats] = {}
        self._placed: dict[tuple[Placement, int, int], StagePlacement] = {}
        self._numbers: dict[tuple[object, ...], int] = {}
        self._examples: list[Any] = []

    def placement(self, layout: Layout) -> StagePlacement:
        """The seats of each pipeline rank, and the numbers of ranks and links."""
        key = (layout.placement, layout.pipeline, layout.stage_ranks)
        if key not in self._placed:
            if layout.placement not in self._seats:
                self._seats[layout.placement] = Seats(self.cluster, layout.placement)
            placed, ranks = self._seats[layout.placement], layout.stage_ranks
            seats = [placed.of(stage * ranks, ranks) for stage in range(layout.pipeline)]
            kinds = [self._intern(seat_kinds(each), each) for each in seats]
            pairs = list(zip(seats, seats[1:] + seats[:1], strict=True))
            links = [self._intern(link_kinds(*pair), pair) for pair in pairs]
            self._placed[key] = StagePlacement(seats, kinds, links)
        return self._placed[key]

    def _intern(self, key: tuple[object, ...], example: Any) -> int:
        """A number for all ranks, or pairs of neighbours, with the same cost; `example` is one of them."""
        if key not in self._numbers:
            self._numbers[key] = len(self._examples)
            self._examples.append(example)
        return self._numbers[key]

    def each(
        self, kept: dict[tuple[object, ...], dict[int, T]], how: tuple[object, ...], numbers: list[int],
        made: Callable[[Any], T],
    ) -> tuple[T, ...]:  # fmt: skip
        """One value for each number, computed once from its example."""
        known = kept.setdefault(how, {})
        try:
            return tuple([known[number] for number in numbers])  # A generator takes twice as long.
        except KeyError:
            for number in set(numbers) - set(known):
                known[number] = made(self._examples[number])
            return tuple([known[number] for number in numbers])
