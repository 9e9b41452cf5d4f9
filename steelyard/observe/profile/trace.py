"""Reads traces of torch's profiler: Chrome trace JSON, gzipped or not."""

from __future__ import annotations

import gzip
import json
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

from steelyard.core.errors import RuntimeFailure
from steelyard.observe.profile.events import COMMUNICATION, Events, Stretch

OWN_RANGES = ("step", "data", "forward", "backward", "weights", "send", "receive", "wait", "gradients", "optimizer")
CUDA = 1  # torch's device type in memory events; 0 is the CPU


def read(path: Path) -> Events:
    """The events of a trace."""
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb") as file:
            entries = json.load(file)["traceEvents"]
        events = _events([entry for entry in entries if isinstance(entry, dict)])
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError) as error:
        raise RuntimeFailure(f"{path} cannot be read as a trace: {error}") from None
    return events


def _events(entries: list[dict[str, Any]]) -> Events:
    events = Events()
    threads = Counter(entry.get("tid") for entry in entries if entry.get("cat") == "cpu_op")
    main = threads.most_common(1)[0][0] if threads else None
    for entry in entries:
        category = entry.get("cat")
        if entry.get("ph") == "X":
            start = float(entry["ts"])
            stretch = Stretch(str(entry["name"]), start, start + float(entry.get("dur", 0)))
            _place(events, stretch, str(category), entry.get("tid") == main)
        elif category == "cpu_instant_event" and entry.get("name") == "[memory]":
            reported = entry["args"]
            events.allocations.append(
                (
                    float(entry["ts"]),
                    int(reported["Bytes"]),
                    int(reported["Total Allocated"]),
                    reported["Device Type"] == CUDA,
                )
            )
    return events


def _place(events: Events, stretch: Stretch, category: str, is_main: bool) -> None:
    if category == "kernel":
        events.kernels.append(stretch)
    elif category in ("gpu_memcpy", "gpu_memset"):
        events.copies.append(stretch)
    elif category in ("cuda_runtime", "cuda_driver"):
        events.calls.append(stretch)
    elif category == "user_annotation" and stretch.name.split(" ")[0] in OWN_RANGES:
        events.ranges.append(stretch)
    elif category in ("user_annotation", "cpu_op") and COMMUNICATION.search(stretch.name):
        events.exchanges.append(stretch)
    elif category == "cpu_op" and is_main:
        events.ops.append(stretch)
