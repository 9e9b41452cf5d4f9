"""What the hosts' devices did, from the samples in `logs/<host>.gpu`."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any

from steelyard.core.run import Run
from steelyard.observe.report import page
from steelyard.observe.report.curves import COLOURS, Charts, is_number, thinned

MOST_HOSTS, MOST_BYTES, MOST_POINTS = 16, 16 << 20, 600
# Title, unit, the key of a device's sample, and what to divide by.
KINDS = (
    ("Utilisation", "%, mean of the host's devices", "utilisation", 1.0),
    ("Memory in use", "GiB, mean of the host's devices", "memory_used", float(1 << 30)),
    ("Temperature", "°C, mean of the host's devices", "temperature", 1.0),
    ("Power", "W, mean of the host's devices", "power", 1.0),
)
Point = tuple[float, float | None]


def devices(run: Run, charts: Charts) -> list[str]:
    """Curves over the minutes of a run, one for each host; nothing where nobody took samples."""
    paths = sorted((run.path / "logs").glob("*.gpu"))
    samples = {path.stem: found for path in paths[:MOST_HOSTS] if (found := _samples(path))}
    if not samples:
        return []
    begin = min(found[0]["time"] for found in samples.values())
    drawn = []
    for title, unit, key, factor in KINDS:
        figure = charts.objects.Figure()
        for number, (host, found) in enumerate(samples.items()):
            points: list[Point] = [((one["time"] - begin) / 60, _mean(one, key, factor)) for one in found]
            points = thinned([point for point in points if point[1] is not None], MOST_POINTS)
            if points:
                minutes, values = zip(*points, strict=True)
                line = {"color": COLOURS[number % len(COLOURS)]}
                figure.add_scatter(x=minutes, y=values, name=html.escape(host), mode="lines", line=line)
        if figure.data:
            shown = charts.draw(figure, height=240, xaxis_title="minutes", yaxis_title=unit)
            drawn.append(f"<div><h3>{title}</h3>{shown}</div>")
    pieces = [f'<div class="charts">{"".join(drawn)}</div>'] if drawn else []
    if pieces and len(paths) > MOST_HOSTS:
        pieces.append(page.paragraph(f"The first {MOST_HOSTS} of {len(paths)} hosts.", "note"))
    return pieces


def _samples(path: Path) -> list[dict[str, Any]]:
    """The samples of a host, the newest where there are very many."""
    found = []
    try:
        with open(path, "rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - MOST_BYTES))
            lines = file.read().decode("utf-8", errors="replace").splitlines()
    except OSError:
        return []
    for line in lines:
        try:
            sample = json.loads(line)
        except ValueError:  # Torn, or cut by the limit.
            continue
        if isinstance(sample, dict) and is_number(sample.get("time")) and isinstance(sample.get("devices"), list):
            found.append(sample)
    return found


def _mean(sample: dict[str, Any], key: str, factor: float) -> float | None:
    values = [one[key] for one in sample["devices"] if isinstance(one, dict) and is_number(one.get(key))]
    return sum(values) / len(values) / factor if values else None
