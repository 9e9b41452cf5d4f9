"""All traces of a run, read once: `profile/summary.json` keeps what was found until a trace changes."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from steelyard.core import files
from steelyard.core.errors import SteelyardError
from steelyard.core.run import Run
from steelyard.observe.profile import nsight, trace
from steelyard.observe.profile.nsight_tools import PROFILE, SUFFIXES
from steelyard.observe.profile.trace_analysis import Look, Named, look
from steelyard.observe.run_files import read_object

SUMMARY = "summary.json"
VERSION = 3  # Of what is kept; another one is not believed.


def read(run: Run) -> tuple[list[Look], list[str]]:
    """What every profiled rank did, and which traces could not be read, and why."""
    folder = run.path / PROFILE
    traces = _traces(folder)
    if not traces:
        return [], []
    seen = {name: [path.stat().st_size, path.stat().st_mtime_ns] for name, path in traces.items()}
    kept = read_object(folder / SUMMARY)
    if kept.get("version") == VERSION and kept.get("traces") == seen:
        try:
            return [_restored(values) for values in kept["ranks"]], list(kept["problems"])
        except (KeyError, TypeError):
            pass
    looks, problems = _read_all(traces)
    summary = {"version": VERSION, "traces": seen, "problems": problems, "ranks": [one.as_result() for one in looks]}
    with suppress(OSError):  # A folder that can only be read is read again each time.
        files.write_json(folder / SUMMARY, summary)
    return looks, problems


def _traces(folder: Path) -> dict[str, Path]:
    """Every trace by its name. Raw data of nsys counts where no report was made of it."""
    found = {}
    for tool, suffix in SUFFIXES.items():
        for path in sorted(folder.glob(f"{tool}-rank-*")):
            is_raw = path.suffix == nsight.RAW and not path.with_suffix(suffix).exists()
            if path.name.endswith(suffix) or is_raw:
                found[path.name] = path
    return found


def _read_all(traces: dict[str, Path]) -> tuple[list[Look], list[str]]:
    looks, problems = [], []
    for name, path in traces.items():
        try:
            tool, _, rank = name.split(".")[0].split("-")
            found = _read(path, tool, int(rank))
        except (SteelyardError, ValueError) as error:
            problems.append(f"{name}: {getattr(error, 'message', error)}")
            continue
        if found is None:
            problems.append(f"{name}: nothing was recorded in it")
        else:
            looks.append(found)
    return looks, problems


def _read(path: Path, tool: str, rank: int) -> Look | None:
    if tool == "ncu":
        return nsight.read_ncu(path, rank)
    events = nsight.read_nsys(path) if tool == "nsys" else trace.read(path)
    return look(events, rank, tool)


def _restored(values: dict[str, Any]) -> Look:
    lists: dict[str, Any] = {key: [Named(**each) for each in values[key]] for key in ("kernels", "waits")}
    taken = values.get("allocators")
    lists["allocators"] = None if taken is None else [Named(**each) for each in taken]
    lists["longest_gaps"] = [tuple(each) for each in values["longest_gaps"]]
    return Look(**values | lists)
