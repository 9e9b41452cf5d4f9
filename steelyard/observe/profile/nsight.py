"""Reads reports of the Nsight tools through the tools themselves: nsys exports SQLite, ncu prints CSV."""

from __future__ import annotations

import csv
import io
import shutil
import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from steelyard.core.errors import RuntimeFailure
from steelyard.observe.profile.events import Events, Stretch
from steelyard.observe.profile.nsight_tools import find
from steelyard.observe.profile.trace import OWN_RANGES
from steelyard.observe.profile.trace_analysis import MOST_KERNELS, Named, RankProfile, most_of

DURATION = "gpu__time_duration.sum"
SPEEDS = {  # in percent of the GPU's peak
    "memory": "gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed",
    "computing": "sm__throughput.avg.pct_of_peak_sustained_elapsed",
}
UNITS = {"nsecond": 1e-9, "ns": 1e-9, "usecond": 1e-6, "us": 1e-6, "msecond": 1e-3, "ms": 1e-3, "second": 1.0, "s": 1.0}
LONGEST_SECONDS = 600
RAW = ".qdstrm"


def read_nsys(path: Path) -> Events:
    """The events of an nsys report, of a database that nsys exported, or of raw data that nsys did not import."""
    if path.suffix == ".sqlite":
        return _database(path)
    if path.suffix == RAW:
        path = _imported(path)
    with TemporaryDirectory(prefix="steelyard-nsys-") as folder:
        exported = Path(folder) / "report.sqlite"
        _output([find("nsys"), "export", "--type", "sqlite", "--force-overwrite", "true", "--output", str(exported),
                 str(path)])  # fmt: skip
        return _database(exported)


def _imported(path: Path) -> Path:
    """Import raw data with Nsight's importer, which some packages of nsys lack."""
    importer = shutil.which("QdstrmImporter")
    if importer is None:
        raise RuntimeFailure(
            "nsys wrote only raw data, since its importer is missing; import it with QdstrmImporter from a full "
            "installation of Nsight Systems, on this or another machine"
        )
    report = path.with_suffix(".nsys-rep")
    _output([importer, "-i", str(path), "-o", str(report)])
    return report


def _database(path: Path) -> Events:
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as database:
            return _events(database)
    except sqlite3.Error as error:
        raise RuntimeFailure(f"{path} cannot be read as an export of nsys: {error}") from None


def _events(database: sqlite3.Connection) -> Events:
    tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    names = dict(database.execute("SELECT id, value FROM StringIds")) if "StringIds" in tables else {}

    def stretches(table: str, column: str) -> Iterator[Stretch]:
        if table not in tables:
            return
        # Table and column names are constants of this file.
        query = f'SELECT "{column}", start, "end" FROM {table} WHERE "end" IS NOT NULL'  # noqa: S608
        if table == "OSRT_API":  # Only the main thread (tid = pid): other threads wait for work.
            query += " AND (globalTid & 0xFFFFFF) = ((globalTid >> 24) & 0xFFFFFF)"
        for name, start, end in database.execute(query):
            text = names.get(name, name) if isinstance(name, int) else name
            yield Stretch(str(text), start / 1e3, end / 1e3)

    events = Events(
        kernels=list(stretches("CUPTI_ACTIVITY_KIND_KERNEL", "demangledName")),
        copies=[*stretches("CUPTI_ACTIVITY_KIND_MEMCPY", "copyKind"),
                *stretches("CUPTI_ACTIVITY_KIND_MEMSET", "deviceId")],
        calls=[*stretches("CUPTI_ACTIVITY_KIND_RUNTIME", "nameId"), *stretches("OSRT_API", "nameId")],
    )  # fmt: skip
    if "NVTX_EVENTS" in tables:
        columns = {row[1] for row in database.execute("PRAGMA table_info(NVTX_EVENTS)")}
        both = "COALESCE(text, textId)" if "textId" in columns else "text"
        query = f'SELECT {both}, start, "end" FROM NVTX_EVENTS WHERE "end" IS NOT NULL'  # noqa: S608
        for name, start, end in database.execute(query):
            text = str(names.get(name, name) if isinstance(name, int) else name)
            if text.split(" ")[0] in OWN_RANGES:
                events.ranges.append(Stretch(text, start / 1e3, end / 1e3))
    return events


def read_ncu(path: Path, rank: int) -> RankProfile:
    """The kernels of an ncu report. ncu runs each kernel alone and several times, so idle and overlap are unknown."""
    return kernels_of(_output([find("ncu"), "--import", str(path), "--csv", "--page", "raw"]), rank)


def kernels_of(text: str, rank: int) -> RankProfile:
    """The kernels in the output of `ncu --csv --page raw`: a line of names, a line of units, a line per kernel."""
    lines = text[text.find('"ID"') :] if '"ID"' in text else ""
    rows = list(csv.DictReader(io.StringIO(lines)))
    unit = UNITS.get(str(rows[0].get(DURATION, "")).strip(), 1e-9) if rows else 1e-9
    by_name: dict[str, list[dict[str, float]]] = {}
    for row in rows[1:]:
        numbers = {name: _number(row.get(column)) for name, column in {"seconds": DURATION, **SPEEDS}.items()}
        if numbers["seconds"] is not None:
            known = {name: value for name, value in numbers.items() if value is not None}
            by_name.setdefault(str(row.get("Kernel Name", "")), []).append(known)
    kernels = most_of([_kernel(name, each, unit) for name, each in by_name.items()], MOST_KERNELS)
    none: dict[str, Any] = {"busy": 0.0, "communication": 0.0, "overlapped": 0.0, "copies": 0.0, "waiting": 0.0}
    return RankProfile(
        rank=rank, tool="ncu", device="gpu", steps=0, seconds=0.0, kernels=kernels, waits=[], idle_by_part={},
        longest_gaps=[], **none,
    )  # fmt: skip


def _kernel(name: str, times: list[dict[str, float]], unit: float) -> Named:
    """All launches of a kernel as one; throughputs are averaged, weighted by time."""
    total = sum(each["seconds"] for each in times)
    speeds = {
        speed: sum(each[speed] * each["seconds"] for each in times) / total
        for speed in SPEEDS
        if total and all(speed in each for each in times)
    }
    return Named(name, len(times), total * unit, **speeds)


def _number(text: Any) -> float | None:
    try:
        return float(str(text).replace(",", ""))
    except ValueError:
        return None


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RuntimeFailure(f"{command[0]} cannot read its report: {error}") from None
    if done.returncode:
        raise RuntimeFailure(f"{command[0]} cannot read its report: {(done.stderr or done.stdout).strip()[:500]}")
    return done.stdout
