"""The summary of a profile as text, with hints."""

from __future__ import annotations

import re
from collections.abc import Sequence

from steelyard.core import units
from steelyard.observe.profile.trace_analysis import OUTSIDE, Named, RankProfile

MUCH_IDLE, SOME_IDLE, MUCH_WAITING, MUCH_TALK, LITTLE_OVERLAP, MUCH_DATA = 0.15, 0.05, 0.10, 0.10, 0.5, 0.05
MUCH_BUSY = 60.0  # percent of the GPU's peak from which on a kernel counts as bound by it
MOST_LETTERS = 70  # of a kernel's name


def reported(seen: Sequence[RankProfile]) -> list[str]:
    """Lines about all profiled ranks."""
    lines = [line for one in seen for line in _rank(one)]
    if len(seen) > 1:
        lines += _between(seen)
    return lines


def _rank(one: RankProfile) -> list[str]:
    what = "The GPU" if one.device == "gpu" else "The CPU"
    if one.tool == "ncu":
        count, total = sum(kernel.count for kernel in one.kernels), sum(kernel.amount for kernel in one.kernels)
        first = f"Rank {one.rank}: ncu measured {count} kernels, each alone: {_ms(total)} in total."
        return [first, *(f"  {_alone(kernel)}" for kernel in one.kernels[:5])]
    steps = f"{one.steps} step{'s' * (one.steps != 1)}" if one.steps else "the whole run"
    lines = [
        f"Rank {one.rank}: {steps}, {_ms(one.seconds)}. {what} was busy {_share(one.busy, one.seconds)} of it and "
        f"idle {_ms(one.idle)} ({_share(one.idle, one.seconds)})" + _where_idle(one) + "."
    ]
    if one.communication:
        lines.append(
            f"  Communication, including waiting for peers, took {_ms(one.communication)} "
            f"({_share(one.communication, one.seconds)}); "
            f"{_share(one.overlapped, one.communication)} of that overlapped with compute."
        )
    if one.waits:
        most = one.waits[0]
        lines.append(
            f"  The host waited {_ms(one.waiting)} ({_share(one.waiting, one.seconds)}), mostly in {most.name} "
            f"({most.count} calls, {_ms(most.amount)}), mostly called {one.asker}."
        )
    if one.kernels:
        lines.append("  " + _top(one))
    if one.peak_bytes:
        lines.append(f"  Peak memory {units.size(one.peak_bytes)}, in {one.peak_part}" + _takers(one) + ".")
    return lines + [f"  {advice}" for advice in _advice(one)]


def _where_idle(one: RankProfile) -> str:
    if list(one.idle_by_part) == [OUTSIDE]:
        return ""
    parts = [f"{name} {_ms(seconds)}" for name, seconds in list(one.idle_by_part.items())[:3] if seconds > 0]
    return f", mostly during {', '.join(parts)}" if parts else ""


def _top(one: RankProfile) -> str:
    total = sum(kernel.amount for kernel in one.kernels)
    noun = "kernels" if one.device == "gpu" else "operators"
    first = ", ".join(f"{short(kernel.name)} {_share(kernel.amount, total)}" for kernel in one.kernels[:4])
    return f"Share of the time of all {noun}: {first}."


def _alone(kernel: Named) -> str:
    """One kernel as measured by ncu, and its bound."""
    text = f"{short(kernel.name)}: {_ms(kernel.amount)} in {kernel.count}"
    if kernel.memory is None or kernel.computing is None:
        return f"{text}."
    text += f", memory at {kernel.memory:.0f}% of peak, compute at {kernel.computing:.0f}%"
    if max(kernel.memory, kernel.computing) < MUCH_BUSY:
        return f"{text}: bound by neither; it may be too small, or bound by latency."
    return f"{text}: bound by {'memory' if kernel.memory > kernel.computing else 'compute'}."


def short(name: str) -> str:
    """A kernel's name without return type, torch's namespaces and parameters."""
    name = re.sub(r"\b(at|native|c10)::|\(anonymous namespace\)::|<unnamed>::|^void ", "", name)
    return re.sub(r"\([^()]*\)$", "", name)[:MOST_LETTERS]


def _takers(one: RankProfile) -> str:
    first = [f"{each.name} {units.size(each.amount)}" for each in (one.allocators or [])[:3]]
    return f"; largest total allocations: {', '.join(first)}" if first else ""


def _advice(one: RankProfile) -> list[str]:
    """Hints for common causes of slow steps."""
    hints = []
    idle, waiting = one.idle / max(one.seconds, 1e-12), one.waiting / max(one.seconds, 1e-12)
    data = one.idle_by_part.get("data", 0.0) / max(one.seconds, 1e-12)
    if data > MUCH_DATA:
        hints.append("Much of the idle time is spent loading data: check the disk of the token files.")
    in_each = bool(one.waits) and one.waits[0].count >= max(1, one.steps)
    if one.device == "gpu" and idle > SOME_IDLE and waiting > MUCH_WAITING and in_each:
        hints.append("Host and GPU wait for each other: something reads a value from the GPU in every step.")
    elif one.device == "gpu" and idle > MUCH_IDLE:
        hints.append("The host launches kernels too slowly: a larger train.micro_batch or train.compile=true reduces "
                     "their number.")  # fmt: skip
    talk = one.communication / max(one.seconds, 1e-12)
    if talk > MUCH_TALK and one.overlapped < LITTLE_OVERLAP * one.communication:
        hints.append("Communication hardly overlaps with compute: fewer tensor or context ranks, or larger "
                     "micro-batches, need less communication.")  # fmt: skip
    between = one.idle_by_part.get("receive", 0.0) / max(one.seconds, 1e-12)
    if between > MUCH_IDLE:
        hints.append("The rank waits for other stages: see the bubble and the balance of the stages (log.timeline, "
                     "steelyard report).")  # fmt: skip
    return hints


def _between(seen: Sequence[RankProfile]) -> list[str]:
    """Comparison of the ranks."""
    measured = [one for one in seen if one.seconds and one.tool == seen[0].tool]
    if len(measured) < 2:
        return []
    busiest = max(measured, key=lambda one: one.busy / one.seconds)
    idlest = min(measured, key=lambda one: one.busy / one.seconds)
    return [
        f"Of {len(measured)} ranks, rank {busiest.rank} was the busiest ({_share(busiest.busy, busiest.seconds)}) and "
        f"rank {idlest.rank} the least busy ({_share(idlest.busy, idlest.seconds)})."
    ]


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms" if seconds < 10 else f"{seconds:.2f} s"


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f}%" if whole else "0%"
