"""The format of a timeline in a report: arrays in base64, drawn by `timeline.js`.

The requested steps, the slowest, the first and the last, and as many others as fit the budget are stored in full, span
by span. For every step the sums of each rank by kind are stored, which are drawn for the other steps.

    ranks, stages       the ranks, and the pipeline rank of each
    hosts, devices      the host of each rank and the type of its device; empty if unknown
    names, lanes, colours   of the kinds of spans
    steps, begin, length    of each step: its number (int32), start (float64) and duration (float32), in ms
    sums                ms by step, rank and name (float32)
    whole               indices in `steps` of those stored in full, ascending
    index               offset of the first span of full step w and rank r: index[w * ranks + r] (uint32)
    start, span         of each span, in ticks from its step's begin (uint32)
    name, stage, micro  of each span (uint8, int16, int16)
    tick                nanoseconds
    first               of each step: ms from its begin to the first pass of any rank (float32)
    predicted           the planner's timeline of a step: {"spans": [[pipeline rank, kind, colour, stage, micro-batch,
                        start, duration], ...], in ms from the first pass, "why_none": reason}; absent in plain packs
"""

from __future__ import annotations

import base64
from collections.abc import Iterable
from typing import Any

import numpy as np

from steelyard.observe.spans import COMPUTE, KINDS, UNKNOWN, Array, Spans

MOST_SPANS = 500_000  # 17 bytes each on the page
SLOWEST = 8


def pack(
    spans: Spans, pipeline_rank: dict[int, int], requested: Iterable[int] = (), most: int = MOST_SPANS
) -> dict[str, Any]:
    """The timeline as an object for JSON."""
    whole = choose(spans, requested, most)
    kinds = [KINDS.get(name, UNKNOWN) for name in spans.names]
    packed: dict[str, Any] = {
        "ranks": [rank.rank for rank in spans.ranks],
        "stages": [pipeline_rank.get(rank.rank, 0) for rank in spans.ranks],
        "names": spans.names,
        "lanes": [lane for lane, _ in kinds],
        "colours": [colour for _, colour in kinds],
        "steps": _base64(spans.steps, "<i4"),
        "begin": _base64((spans.begin - spans.begin[0]) / 1e6, "<f8"),
        "length": _base64(spans.length / 1e6, "<f4"),
        "sums": _base64(spans.sums / 1e6, "<f4"),
        "whole": [int(place) for place in whole],
        "first": _base64(_first_pass(spans) / 1e6, "<f4"),
    }
    return packed | _spans(spans, whole)


def _first_pass(spans: Spans) -> Array:
    """Nanoseconds from the begin of each step to its first pass on any rank."""
    first = spans.end.copy()
    for rank in spans.ranks:
        chosen = np.isin(rank.name, spans.lane(COMPUTE))
        np.minimum.at(first, np.searchsorted(spans.steps, rank.step[chosen]), rank.start[chosen])
    return first - spans.begin


def choose(spans: Spans, requested: Iterable[int], most: int) -> list[int]:
    """Indices of the steps to store in full: the most important first, until the budget is spent."""
    count = len(spans.steps)
    sizes = np.zeros(count, dtype=np.int64)
    for rank in spans.ranks:
        np.add.at(sizes, np.searchsorted(spans.steps, rank.step), 1)
    wanted = [int(place) for place in np.flatnonzero(np.isin(spans.steps, list(requested)))]
    slowest = [int(place) for place in np.argsort(-spans.length, kind="stable")[:SLOWEST]]
    middle = int(np.argsort(spans.length, kind="stable")[count // 2])
    chosen: dict[int, None] = {}
    left = most
    for place in [*wanted, *slowest, middle, 0, count - 1, *_spread(count)]:
        if place not in chosen and (sizes[place] <= left or not chosen):
            chosen[place] = None
            left -= int(sizes[place])
    return sorted(chosen)


def _spread(count: int) -> list[int]:
    """All indices, evenly spread from the first: halves, quarters, and so on."""
    step, order = 1 << max(0, (count - 1).bit_length()), []
    seen: set[int] = set()
    while step:
        order += [place for place in range(0, count, step) if place not in seen]
        seen.update(order)
        step //= 2
    return order


def _spans(spans: Spans, whole: list[int]) -> dict[str, Any]:
    tick = max(1, -(-int(spans.length[whole].max()) // (2**32 - 1))) if whole else 1
    index, columns = [0], []
    cuts = []
    for rank in spans.ranks:
        order = np.argsort(rank.step, kind="stable")
        cuts.append((rank, order, rank.step[order]))
    for place in whole:
        for rank, order, sorted_steps in cuts:
            first, last = np.searchsorted(sorted_steps, [spans.steps[place], spans.steps[place] + 1])
            rows = order[first:last]
            start = (rank.start[rows] - spans.begin[place]) // tick
            columns.append(
                (start, (rank.end[rows] - rank.start[rows]) // tick, rank.name[rows], rank.stage[rows],
                 rank.micro_batch[rows])
            )  # fmt: skip
            index.append(index[-1] + len(rows))
    start, length, name, stage, micro = (np.concatenate(each) for each in zip(*columns, strict=True))
    return {
        "tick": tick,
        "index": _base64(np.array(index), "<u4"),
        "start": _base64(start, "<u4"),
        "span": _base64(np.clip(length, 0, None), "<u4"),
        "name": _base64(name, "<u1"),
        "stage": _base64(np.clip(stage, -1, 32767), "<i2"),
        "micro": _base64(np.clip(micro, -1, 32767), "<i2"),
    }


def _base64(values: Array, dtype: str) -> str:
    return base64.b64encode(np.ascontiguousarray(values, dtype=dtype).tobytes()).decode("ascii")
