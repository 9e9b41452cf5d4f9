"""The attempts of a run: when each began, on which hosts, in which layout, how it ended; and markers for its curves.

`sessions.jsonl` in the run folder has one object each time that the ranks started (`training/host_info.py`). For an
elastic run, `attempts.jsonl` has one for each attempt that was planned, and one for each reason to wait:

    {"attempt": 2, "time": ISO, "why": "b2 does not answer since 12:03:07", "nodes": ["a1"], "layout": {...}}
    {"waiting": "needs 2 nodes, 1 is alive", "time": ISO}

A folder of an older version has neither; it has one attempt, from its manifest. The result:

    attempt   {"number": 2, "kind": "restart", "started": 1700000000.0, "ended": null, "step": 300, "last_step": 420,
               "repeated": 12, "hosts": ["a1", "a2"], "devices": "NVIDIA H200", "layout": "8 ranks, pipeline 2, data 4",
               "changed": "world 16 -> 8", "end": "running"}
    marker    {"kind": "checkpoint", "level": "", "step": 300, "time": 1700000000.0, "text": "checkpoint at step 300"}

`kind` of an attempt is `start`, `restart`, or `replan`, a restart in another layout. A marker has a step, a time, or
both.
"""

from __future__ import annotations

import os
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

from steelyard.core.file_tail import last_lines
from steelyard.core.run import SESSIONS
from steelyard.core.safe_parse import json_objects
from steelyard.observe.host_logs import is_number
from steelyard.observe.run_state import RunState, seconds_of

MOST_ATTEMPTS, MOST_MARKERS = 200, 500
ATTEMPTS = "attempts.jsonl"  # of an elastic run
VERDICTS = "verdicts.jsonl"  # written by `observe/notify.py`
AXES = ("tensor", "context", "pipeline", "data", "virtual", "expert")
_CHECKPOINT = re.compile(r"step-(\d{1,15})")
Known = dict[str, Any]


def attempts(state: RunState, end: str) -> list[Known]:
    """All attempts, oldest first; `end` is the state of the last one."""
    reported = _merged(state.path) or _only(state)
    found: list[Known] = []
    for number, each in enumerate(reported, start=1):
        changed = _changes(reported[number - 2]["layout"], each["layout"]) if number > 1 else ""
        found.append({
            "number": number,
            "kind": "start" if number == 1 else "replan" if changed else "restart",
            "started": seconds_of(each.get("time")),
            "ended": None,
            "step": _whole(each.get("step")),
            "last_step": None,
            "repeated": _whole(each.get("repeated")) or 0,
            "hosts": [str(host) for host in each["hosts"]],
            "devices": str(each.get("devices") or ""),
            "layout": _described(each["layout"]),
            "changed": changed,
            "end": each["end"],
        })  # fmt: skip
    for one, following in pairwise(found):
        if following["step"] is not None:
            one["last_step"] = following["step"] + following["repeated"]
    if found:
        steps = [record["step"] for record in list(state.metrics)[-1:]]
        ended = seconds_of(state.manifest.get("ended")) if end != "running" else None
        waits = "; ".join(each for each in (end, found[-1]["end"]) if each)
        found[-1] |= {"end": waits, "last_step": steps[0] if steps else None, "ended": ended}
    return found


def _merged(path: Path) -> list[Known]:
    """Planned attempts and started sessions in the order of their times; a session belongs to the attempt before it."""
    planned = [each for each in _objects(path / ATTEMPTS, MOST_ATTEMPTS) if "attempt" in each or "waiting" in each]
    both = [*planned, *_objects(path / SESSIONS, MOST_ATTEMPTS)]
    found: list[Known] = []
    for each in sorted(both, key=lambda one: seconds_of(one.get("time")) or 0.0):
        if "waiting" in each:
            if found:
                found[-1]["end"] = "; ".join(part for part in (found[-1]["end"], f"waiting: {each['waiting']}") if part)
            continue
        hosts = each.get("hosts") or each.get("nodes")
        known = each | {
            "layout": each["layout"] if isinstance(each.get("layout"), dict) else {},
            "hosts": hosts if isinstance(hosts, list) else [],
            "end": "",
        }
        last = found[-1] if found else {}
        if "attempt" in last and "attempt" not in each and "step" not in last:
            found[-1] = last | known | {"layout": last["layout"] | known["layout"], "time": last.get("time")}
            continue
        if last:  # Why an attempt ended is why the next one was planned.
            last["end"] = "; ".join(part for part in (str(each.get("why") or "ended"), last["end"]) if part)
        found.append(known)
    return found


def markers(state: RunState, known: list[Known], verdicts: list[Known]) -> list[Known]:
    """Restarts, replans, checkpoints and verdicts, in the order of their times."""
    found = []
    for one in known[1:]:
        text = f"attempt {one['number']} from step {one['step'] if one['step'] is not None else '?'}"
        text += f": {one['changed']}" if one["changed"] else ""
        found.append(_marker(one["kind"], one["step"], one["started"], f"{one['kind']}, {text}"))
    for step, moment in _checkpoints(state.path / "checkpoints"):
        found.append(_marker("checkpoint", step, moment, f"checkpoint at step {step}"))
    reported = _objects(state.path / VERDICTS, MOST_MARKERS)
    for each in sorted([*reported, *verdicts], key=lambda one: seconds_of(one.get("time")) or 0.0):
        level, text = str(each.get("level") or ""), str(each.get("message") or "").split("\n")[0]
        found.append(_marker("verdict", _whole(each.get("step")), seconds_of(each.get("time")), text, level))
    return found[-MOST_MARKERS:]


def _marker(kind: str, step: int | None, moment: float | None, text: str, level: str = "") -> Known:
    return {"kind": kind, "level": level, "step": step, "time": moment, "text": text}


def _only(state: RunState) -> list[Known]:
    """The attempt of a folder that has no record of attempts."""
    if not state.hosts and state.manifest.get("started") is None:
        return []
    hosts = list(state.hosts.values())
    devices = ", ".join(sorted({str(host["device"]) for host in hosts if host.get("device")}))
    layout = hosts[0]["layout"] if hosts else {}
    known = {"hosts": list(state.hosts), "devices": devices, "layout": layout, "end": ""}
    return [known | {"time": state.manifest.get("started")}]


def _checkpoints(folder: Path) -> list[tuple[int, float]]:
    """Steps and times of the checkpoints that are on disk."""
    try:
        with os.scandir(folder) as entries:
            named = [(found, entry) for entry in entries if (found := _CHECKPOINT.fullmatch(entry.name))]
            return sorted((int(found[1]), entry.stat().st_mtime) for found, entry in named)
    except OSError:
        return []


def _described(layout: Known) -> str:
    """A layout in words: the number of ranks and every axis longer than one."""
    world = layout.get("world")
    parts = [] if world is None else [f"{world} {'rank' if world == 1 else 'ranks'}"]
    parts += [f"{axis} {layout[axis]}" for axis in AXES if layout.get(axis) not in (None, 1)]
    if layout.get("pipeline") not in (None, 1) and layout.get("partition"):
        parts.append(f"partition {layout['partition']}")
    if layout.get("micro_batch") is not None:
        parts.append(f"micro-batch {layout['micro_batch']}")
    return ", ".join(parts)


def _changes(before: Known, after: Known) -> str:
    keys = [key for key in after if key in before and before[key] != after[key] and key != "steps"]
    return ", ".join(f"{key} {before[key]} -> {after[key]}" for key in keys)


def _objects(path: Path, most: int) -> list[Known]:
    return list(json_objects(last_lines(path, most)))


def _whole(value: Any) -> int | None:
    return int(value) if is_number(value) else None
