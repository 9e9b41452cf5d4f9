"""Which collective a run hangs in, from the flight records of its ranks (`training/watchdog.py`).

A rank that waits writes how many collectives of each process group it has entered and completed. The first collective
that not all ranks have completed is the one that hangs. Ranks that have not entered it keep the others waiting: those
that wait in no other collective are the cause. A rank without a record did not answer: its process is stopped, gone, or
blocked outside of Python.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steelyard.core.safe_parse import read_object
from steelyard.observe.host_logs import is_number
from steelyard.observe.rules import some
from steelyard.observe.run_files import listed

FLIGHT = "flight"
MOST_RANKS, MOST_BYTES = 4096, 1 << 20


@dataclass(frozen=True)
class Hang:
    """A collective that some ranks of a group have entered and others have not."""

    op: str
    group: str
    ranks: list[int]
    entered: list[int]
    missing: list[int]
    since: float


def read(run: Path, since: float) -> dict[int, dict[str, Any]]:
    """The flight records that ranks wrote after a time, by rank."""
    found = {}
    for path in listed(run / FLIGHT, ".json")[:MOST_RANKS]:
        try:
            if path.stat().st_size > MOST_BYTES:
                continue
        except OSError:
            continue
        record = read_object(path)
        rank, at = record.get("rank"), record.get("time")
        if type(rank) is int and is_number(at) and at >= since:
            record["groups"] = [each for each in _list(record.get("groups")) if _is_group(each)]
            found[rank] = record
    return found


def hang(records: dict[int, dict[str, Any]]) -> Hang | None:
    """The collective that hangs; None if all ranks have entered all collectives that any of them has entered."""
    hangs = [each for each in map(_hang_of, _groups(records)) if each is not None and each.missing]
    waiting = {rank for each in hangs for rank in each.entered}

    def order(each: Hang) -> tuple[bool, bool, float]:
        causes = [rank for rank in each.missing if rank not in waiting]
        return not causes, all(rank in records for rank in causes), each.since

    return min(hangs, key=order, default=None)


def described(found: Hang, records: dict[int, dict[str, Any]], hosts: dict[int, str]) -> str:
    """Such as: all_reduce of group data (ranks 0, 1): rank 0 waits in it since 12:03:07; ..."""
    at = time.strftime("%H:%M:%S", time.localtime(found.since))
    waits = "waits" if len(found.entered) == 1 else "wait"
    silent = [rank for rank in found.missing if rank not in records]
    others = [rank for rank in found.missing if rank in records]
    parts = [f"{named(found.entered, {})} {waits} in it since {at}"]
    if silent:
        parts.append(f"{named(silent, hosts)} did not enter it and {'does' if len(silent) == 1 else 'do'} not answer")
    for rank in others[:2]:
        function = place(records[rank])
        parts.append(f"{named([rank], hosts)} did not enter it" + (f" and is in {function}" if function else ""))
    if len(others) > 2:
        parts.append(f"{len(others) - 2} more did not enter it")
    return f"{found.op} of group {found.group} ({named(found.ranks, {})}): " + "; ".join(parts)


def named(ranks: list[int], hosts: dict[int, str]) -> str:
    """The ranks in words, with their hosts if there are few."""
    if len(ranks) <= 2 and hosts:
        return " and ".join(f"rank {rank}" + (f" on {hosts[rank]}" if rank in hosts else "") for rank in ranks)
    return f"rank{'s' if len(ranks) != 1 else ''} {some([str(rank) for rank in ranks], 8)}"


def _groups(records: dict[int, dict[str, Any]]) -> list[tuple[str, list[int], dict[int, dict[str, Any]]]]:
    """Each process group: its name, its ranks, and what each of them reports. Names alone are not unique."""
    groups: dict[tuple[str, str, tuple[int, ...]], dict[int, dict[str, Any]]] = {}
    for rank, record in records.items():
        for group in record["groups"]:
            backend = str(group.get("op")).partition(":")[0]
            groups.setdefault((str(group.get("name")), backend, tuple(group["ranks"])), {})[rank] = group
    return [(name, list(ranks) or sorted(reported), reported) for (name, _, ranks), reported in groups.items()]


def _hang_of(group: tuple[str, list[int], dict[int, dict[str, Any]]]) -> Hang | None:
    name, ranks, reported = group
    first = min(each["completed"] for each in reported.values()) + 1
    entered = sorted(rank for rank, each in reported.items() if each["entered"] >= first > each["completed"])
    if not entered:
        return None
    beyond = {rank for rank, each in reported.items() if each["completed"] >= first}
    missing = [rank for rank in ranks if rank not in entered and rank not in beyond]
    newest = reported[entered[0]]
    return Hang(
        str(newest.get("op")).partition(":")[2] or str(newest.get("op")), name.removeprefix("mesh_"), ranks, entered,
        missing, min(float(reported[rank]["since"]) for rank in entered),
    )  # fmt: skip


def place(record: dict[str, Any]) -> str:
    """The innermost function of a rank that does not wait in the collective."""
    stack = [str(each)[:100] for each in _list(record.get("stack"))]
    return stack[-1] if stack else ""


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _is_group(value: Any) -> bool:
    if not isinstance(value, dict) or not is_number(value.get("since")):
        return False
    ranks = value.get("ranks")
    are_ranks = isinstance(ranks, list) and all(type(rank) is int for rank in ranks)
    return are_ranks and all(type(value.get(key)) is int for key in ("entered", "completed"))
