"""The profile section of a report."""

from __future__ import annotations

from steelyard.core import units
from steelyard.core.pages import page
from steelyard.core.run import Run
from steelyard.observe.profile.summary import reported
from steelyard.observe.profile.trace_analysis import Named, RankProfile
from steelyard.observe.profile.trace_cache import read

MOST_RANKS, MOST_LETTERS = 8, 110  # ranks whose kernels are listed, and characters of a kernel's name


def profile_section(run: Run) -> list[str]:
    """The summary, a table of all ranks, and the top kernels of the first ranks; empty without a profile."""
    profiles, problems = read(run)
    if not profiles and not problems:
        return []
    pieces = [page.text("\n".join(reported(profiles)), wrapped=True)] if profiles else []
    measured = [one for one in profiles if one.seconds]
    if measured:
        head = ["", "profiled", "busy", "communication", "of that overlapped", "idle", "host waited"]
        pieces.append(page.table([_row(one) for one in measured], head=head, numbers=True))
    for one in profiles[:MOST_RANKS]:
        noun = "kernels" if one.device == "gpu" else "operators"
        pieces += _listed(f"Rank {one.rank}, {one.tool}: {noun}, by self time", one.kernels, is_bytes=False)
        pieces += _listed(f"Rank {one.rank}: memory by operator", one.allocators or [], is_bytes=True)
        pieces += _listed(f"Rank {one.rank}: where the host waited", one.waits, is_bytes=False)
        pieces += _gaps(one)
    if len(profiles) > MOST_RANKS:
        hint = f"For all {len(profiles)} ranks: steelyard profile show {run.path} --json"
        pieces.append(page.paragraph(hint, "note"))
    return pieces + [page.paragraph(f"Not read: {problem}", "note") for problem in problems]


def _row(one: RankProfile) -> list[str]:
    def share(part: float) -> str:
        return f"{100 * part / one.seconds:.1f}%"

    overlap = f"{100 * one.overlapped / one.communication:.1f}%" if one.communication else ""
    return [
        f"rank {one.rank}, {one.tool}", f"{1e3 * one.seconds:.2f} ms", share(one.busy), share(one.communication),
        overlap, share(one.idle), share(one.waiting),
    ]  # fmt: skip


def _listed(title: str, named: list[Named], is_bytes: bool) -> list[str]:
    if not named:
        return []
    total, speeds = sum(each.amount for each in named), any(each.memory is not None for each in named)
    rows = [
        [
            each.name[:MOST_LETTERS],
            str(each.count),
            units.size(each.amount) if is_bytes else f"{1e3 * each.amount:.3f} ms",
            f"{100 * each.amount / total:.1f}%" if total else "",
            *(("" if speed is None else f"{speed:.0f}%" for speed in (each.memory, each.computing)) if speeds else ()),
        ]
        for each in named
    ]
    head = ["", "count", "total", "share", *(["memory throughput", "compute throughput"] if speeds else ())]
    return [page.folded_piece(title, page.table(rows, head=head, numbers=True))]


def _gaps(one: RankProfile) -> list[str]:
    if not one.longest_gaps:
        return []
    rows = [[part, f"{1e3 * seconds:.3f} ms", doing[:MOST_LETTERS]] for part, seconds, doing in one.longest_gaps]
    shown = page.table(rows, head=["part of the step", "duration", "host mostly in"])
    return [page.folded_piece(f"Rank {one.rank}: the longest idle gaps", shown)]
