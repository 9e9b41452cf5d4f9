"""GPU curves of each host, from the samples in `logs/<host>.gpu`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from steelyard.core.pages import charts, page
from steelyard.core.pages.charts import Line
from steelyard.core.run import Run
from steelyard.core.safe_parse import loads
from steelyard.observe.report.curves_section import is_number, thinned

MOST_HOSTS, MOST_BYTES, MOST_POINTS = 16, 16 << 20, 600
# Title, unit, key of a device's sample, and divisor.
KINDS = (
    ("Utilisation", "%, mean of the host's devices", "utilisation", 1.0),
    ("Memory in use", "GiB, mean of the host's devices", "memory_used", float(1 << 30)),
    ("Temperature", "°C, mean of the host's devices", "temperature", 1.0),
    ("Power", "W, mean of the host's devices", "power", 1.0),
)
Point = tuple[float, float | None]


def devices(run: Run) -> list[str]:
    """Curves over the minutes of a run, one per host; empty without samples."""
    paths = sorted((run.path / "logs").glob("*.gpu"))
    samples = {path.stem: each for path in paths[:MOST_HOSTS] if (each := _samples(path))}
    if not samples:
        return []
    begin = min(each[0]["time"] for each in samples.values())
    drawn = []
    for title, unit, key, factor in KINDS:
        lines = []
        for number, (host, each) in enumerate(samples.items()):
            points: list[Point] = [((one["time"] - begin) / 60, _mean(one, key, factor)) for one in each]
            points = thinned([point for point in points if point[1] is not None], MOST_POINTS)
            if points:
                minutes, values = zip(*points, strict=True)
                lines.append(Line("mean", minutes, values, colour=number, run=host))
        if lines:
            group = f"devices of {run.path.name}"
            drawn.append(charts.titled(title, charts.lines(lines, "minutes", unit, group=group, height=240)))
    pieces = [charts.side_by_side(drawn)] if drawn else []
    if pieces and len(paths) > MOST_HOSTS:
        pieces.append(page.paragraph(f"The first {MOST_HOSTS} of {len(paths)} hosts.", "note"))
    return pieces


def _samples(path: Path) -> list[dict[str, Any]]:
    """The samples of a host; only the newest of a large file."""
    samples = []
    try:
        with open(path, "rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - MOST_BYTES))
            lines = file.read().decode("utf-8", errors="replace").splitlines()
    except OSError:
        return []
    for line in lines:
        try:
            sample = loads(line)
        except ValueError:  # Truncated by a killed writer or by the limit.
            continue
        if isinstance(sample, dict) and is_number(sample.get("time")) and isinstance(sample.get("devices"), list):
            samples.append(sample)
    return samples


def _mean(sample: dict[str, Any], key: str, factor: float) -> float | None:
    values = [one[key] for one in sample["devices"] if isinstance(one, dict) and is_number(one.get(key))]
    return sum(values) / len(values) / factor if values else None
