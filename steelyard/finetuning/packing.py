"""Best-fit-decreasing packing: each conversation, longest first, goes to the row with the least sufficient space."""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np
import numpy.typing as npt


def best_fit(sizes: npt.NDArray[np.int64], capacity: int) -> list[list[int]]:
    """Rows of indices whose sizes sum to at most `capacity`; every index is in one row. Each size must fit alone."""
    rows: list[list[int]] = []
    by_room: dict[int, list[int]] = {}
    rooms: list[int] = []  # The keys of `by_room`, sorted.
    for index in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[index])
        place = bisect_left(rooms, size)
        if place == len(rooms):
            room = capacity
            rows.append([])
            row = len(rows) - 1
        else:
            room = rooms[place]
            row = by_room[room].pop()
            if not by_room[room]:
                del by_room[room], rooms[place]
        rows[row].append(index)
        left = room - size
        if left:
            if left not in by_room:
                insort(rooms, left)
            by_room.setdefault(left, []).append(row)
    return rows


def efficiency(sizes: npt.NDArray[np.int64], rows: list[list[int]], capacity: int) -> float:
    """The share of positions in the rows that are used."""
    return float(sizes.sum()) / max(1, len(rows) * capacity)
