"""The runs under a folder, with the state of each, for `steelyard list`."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

from steelyard.core.errors import SteelyardError, UserError
from steelyard.core.file_tail import last_lines
from steelyard.core.printable import without_control
from steelyard.core.run import MANIFEST, METRICS, Run
from steelyard.core.safe_parse import json_objects, read_object
from steelyard.launch import find_runs, launch_record

COLUMNS = ("name", "state", "backend", "jobs", "nodes", "step", "submitted", "started")
SHOWN = ("name", "state", "backend", "jobs", "nodes", "step", "since")


def rows(folder: Path) -> list[dict[str, Any]]:
    """One row for each run, oldest first."""
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}", hint="steelyard train and steelyard submit create runs/")
    return [_row(path, folder) for path in sorted(find_runs.below(folder), key=_age)]


def _age(path: Path) -> tuple[float, str]:
    first = path / launch_record.LAUNCH
    try:
        return (first if first.is_file() else path / MANIFEST).stat().st_mtime, path.name
    except OSError:
        return 0.0, path.name


def _row(path: Path, folder: Path) -> dict[str, Any]:
    name = path.name if path == folder else str(path.relative_to(folder))
    try:
        launch = launch_record.launched(path)
        state = launch_record.state(launch_record.refresh(path), launch) if launch else _own_state(path)
    except (SteelyardError, OSError) as error:
        return dict.fromkeys(COLUMNS) | {"name": name, "run": str(path), "state": f"unreadable: {error}"}
    return {
        "name": name,
        "run": str(path),
        "state": state or ("not submitted" if launch and not launch.jobs else "unknown"),
        "backend": launch.backend if launch else None,
        "jobs": launch.jobs if launch else [],
        "nodes": launch.nodes if launch else None,
        "step": _step(path),
        "submitted": launch.submitted if launch else None,
        "started": _started(path),
    }


def _own_state(path: Path) -> str:
    return Run(path).state if (path / MANIFEST).is_file() else "unknown"


def _started(path: Path) -> str | None:
    started = read_object(path / MANIFEST).get("started")
    return started if isinstance(started, str) else None


def _step(path: Path) -> int | None:
    """The last logged step, read from the end of the metrics file."""
    lines = last_lines(path / METRICS, 5)
    return next((each["step"] for each in json_objects(reversed(lines)) if isinstance(each.get("step"), int)), None)


def as_text(rows_: list[dict[str, Any]], folder: Path) -> str:
    """The rows as a table."""
    if not rows_:
        return f"no runs under {folder}"
    cells = [list(SHOWN), *(_cells(row) for row in rows_)]
    widths = [max(len(row[number]) for row in cells) for number in range(len(SHOWN))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    return "\n".join(without_control(line, "?") for line in lines)


def _cells(row: dict[str, Any]) -> list[str]:
    since = row | {"since": _when(row["submitted"] or row["started"])}
    return [_cell(since[column]) for column in SHOWN]


def _when(moment: str | None) -> str | None:
    """A timestamp in local time."""
    try:
        return datetime.fromisoformat(moment).astimezone().strftime("%Y-%m-%d %H:%M") if moment else None
    except ValueError:
        return moment


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "-"
    return "-" if value is None else str(value)
