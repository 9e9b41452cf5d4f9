"""Which layouts of a mesh fit in memory, and which of these are worth a simulation.

Sequence parallelism is chosen per layout. It divides the memory traffic and the sends of the residual stream, but
launches two collectives instead of one, so small layers that wait for the host are faster without it. It usually saves
memory, except under selective recomputation on two tensor ranks, which keeps the gathered tensors. One of the two
settings is skipped only if it is no faster in any stage, or if it takes no less memory than the other, which did not
fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from steelyard.planning import memory_fit, partition
from steelyard.planning.candidates import Candidates, MeshCandidate
from steelyard.planning.layout import Layout
from steelyard.planning.layout_space import Variant


@dataclass
class Fitting:
    """The layouts of a mesh that fit with one setting of recomputation."""

    layouts: list[Layout]
    left: list[bool]
    """Settings of sequence parallelism that do not fit, and may fit with more recomputation."""
    slow: list[bool]
    """Settings that fit, but not with the fastest ZeRO stage and balanced layers: recomputation may be faster."""
    squeezed: bool
    """Whether a layout fits only after layers were moved off stages without enough memory."""


def may_fit(candidates: Candidates, mesh: MeshCandidate) -> bool:
    """Whether the layout of the mesh that needs the least memory fits; if not, none of its layouts does."""
    zeros = candidates.zeros(mesh)[-1:]
    return bool(fitting(candidates, mesh, candidates.limits.recomputes[-1], candidates.sequences(mesh), zeros).layouts)


def fitting(
    candidates: Candidates,
    mesh: MeshCandidate,
    recompute: str,
    sequences: Sequence[bool],
    zeros: Sequence[int] | None = None,
) -> Fitting:
    """For each setting of sequence parallelism, the layout with the fastest ZeRO stage that fits."""
    found = Fitting([], [], [], False)
    zeros = candidates.zeros(mesh) if zeros is None else zeros
    tight: tuple[Layout, int] | None = None
    for sequence in sequences:
        layout = mesh.layout(Variant(recompute, zeros[0], sequence))
        layout = layout.with_partition(candidates.balanced(candidates.step(layout)))
        if found.layouts and _is_no_faster(candidates, layout, found.layouts[0]):
            continue
        if tight is not None and _is_no_smaller(candidates, layout, *tight):
            found.left.append(sequence)
            continue
        fits, tight = _first_fitting(candidates, [replace(layout, zero=zero) for zero in zeros])
        if fits is None:
            found.left.append(sequence)
            continue
        found.layouts.append(fits)
        found.squeezed |= fits.partition != layout.partition
        if tight is not None:
            found.slow.append(sequence)
            tight = None
    return found


def _is_no_faster(candidates: Candidates, layout: Layout, other: Layout) -> bool:
    """Whether no stage and no send is faster than in a layout that differs only in sequence parallelism."""
    one, two = candidates.step(layout), candidates.step(other)
    for counts in {layout.partition, other.partition}:
        ours, theirs = one.times(counts), two.times(counts)
        pairs = zip(ours.everything(), theirs.everything(), strict=True)
        if any(mine < its for mine, its in pairs):
            return False
    return True


def _is_no_smaller(candidates: Candidates, layout: Layout, other: Layout, rank: int) -> bool:
    """Whether the layout takes no less memory than another one on the rank where that one does not fit."""
    ours, theirs = replace(layout, zero=other.zero, partition=other.partition), other
    [mine], [its] = (memory_fit.rooms(candidates.predictor(each), each, [rank]) for each in (ours, theirs))
    return mine.memory.total >= its.memory.total


def _first_fitting(candidates: Candidates, layouts: list[Layout]) -> tuple[Layout | None, tuple[Layout, int] | None]:
    """The first layout that fits, in the order of the time of the slowest rank's passes and what follows them.

    Also one that does not fit, if there is one before it, and a rank on which it does not fit.
    """
    timed = []
    for number, layout in enumerate(layouts):
        step = candidates.step(layout)
        times = step.times(layout.partition)
        after = max(sum(step.after(layout.partition, times, rank)) for rank in range(layout.pipeline))
        timed.append((step.at_least(layout.partition) + after, number, layout))
    tight: tuple[Layout, int] | None = None
    for _, _, layout in sorted(timed):
        candidates.found.looked_at += 1
        predictor = candidates.predictor(layout)
        rooms = memory_fit.rooms(predictor, layout, memory_fit.deciding_ranks(predictor, layout))
        if all(room.fits for room in rooms):
            return layout, tight
        tight = layout, next(room.rank for room in rooms if not room.fits)
        if not candidates.limits.even and any(room.fits for room in rooms):
            again = partition.within(predictor, layout, candidates.recipe.model.layers)
            if again is not None:
                return again, tight
        candidates.found.exclude(layout, rooms)
    return None, tight
