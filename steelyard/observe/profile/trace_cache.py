"""Analyzes all traces of a run. The result is cached in `profile/summary.json` until a trace changes."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from steelyard.core import files
from steelyard.core.errors import SteelyardError
from steelyard.core.run import Run
from steelyard.core.safe_parse import read_object
from steelyard.observe.profile import nsight, trace
from steelyard.observe.profile.nsight_tools import PROFILE, SUFFIXES
from steelyard.observe.profile.trace_analysis import Named, RankProfile, analyze

SUMMARY = "summary.json"
VERSION = 3  # of the cache; other versions are ignored


def read(run: Run) -> tuple[list[RankProfile], list[str]]:
    """The analysis of every profiled rank, and why traces could not be read."""
    folder = run.path / PROFILE
    traces = traces_in(folder)
    if not traces:
        return [], []
    stamps = {name: [path.stat().st_size, path.stat().st_mtime_ns] for name, path in traces.items()}
    cached = read_object(folder / SUMMARY)
    if cached.get("version") == VERSION and cached.get("traces") == stamps:
        try:
            return [_restored(values) for values in cached["ranks"]], list(cached["problems"])
        except (KeyError, TypeError):
            pass
    profiles, problems = read_all(traces)
    ranks = [one.as_result() for one in profiles]
    summary = {"version": VERSION, "traces": stamps, "problems": problems, "ranks": ranks}
    with suppress(OSError):  # A read-only folder has no cache.
        files.write_json(folder / SUMMARY, summary)
    return profiles, problems


def traces_in(folder: Path) -> dict[str, Path]:
    """All traces by name. Raw data of nsys counts if there is no report of it."""
    traces = {}
    for tool, suffix in SUFFIXES.items():
        for path in sorted(folder.glob(f"{tool}-rank-*")):
            is_raw = path.suffix == nsight.RAW and not path.with_suffix(suffix).exists()
            if path.name.endswith(suffix) or is_raw:
                traces[path.name] = path
    return traces


def read_all(traces: dict[str, Path]) -> tuple[list[RankProfile], list[str]]:
    """The analysis of every trace, and why some could not be read."""
    profiles, problems = [], []
    for name, path in traces.items():
        try:
            tool, _, rank = name.split(".")[0].split("-")
            one = _read(path, tool, int(rank))
        except (SteelyardError, ValueError) as error:
            problems.append(f"{name}: {getattr(error, 'message', error)}")
            continue
        if one is None:
            problems.append(f"{name}: no events recorded")
        else:
            profiles.append(one)
    return profiles, problems


def _read(path: Path, tool: str, rank: int) -> RankProfile | None:
    if tool == "ncu":
        return nsight.read_ncu(path, rank)
    events = nsight.read_nsys(path) if tool == "nsys" else trace.read(path)
    return analyze(events, rank, tool)


def _restored(values: dict[str, Any]) -> RankProfile:
    lists: dict[str, Any] = {key: [Named(**each) for each in values[key]] for key in ("kernels", "waits")}
    taken = values.get("allocators")
    lists["allocators"] = None if taken is None else [Named(**each) for each in taken]
    lists["longest_gaps"] = [tuple(each) for each in values["longest_gaps"]]
    return RankProfile(**values | lists)
