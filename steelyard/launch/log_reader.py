"""Reads the logs of each host: the last lines of every log, and the lines that are added while following it.

`logs/<host>.out` and `.err` are text, `logs/<host>.gpu` are samples (see `gpu_monitor.py`), shown one line per device.
Output of ranks is not trusted: control characters, which could rewrite the terminal, are shown as `?`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from steelyard.core.errors import UserError
from steelyard.core.file_tail import last_lines
from steelyard.core.printable import without_control
from steelyard.core.safe_parse import loads
from steelyard.launch import backends, launch_record

STREAMS = ("out", "err", "gpu")
PRINTED = (
    "out",
    "err",
    "log",
)  # A `.log` belongs to the launcher. It is the only log of a job that fails before its ranks start.
SECONDS_BETWEEN_LOOKS = 0.5
SECONDS_BETWEEN_QUESTIONS = 3.0  # between queries of the scheduler whether the run is over


def paths(run: Path, node: str | None = None, stream: str | None = None) -> list[Path]:
    """The logs of a run, sorted by host."""
    wanted = PRINTED if stream is None else (stream,)
    launch = launch_record.read(run)
    present = backends.load(launch.backend if launch is not None else "local").logs(run)
    if stream == "err" and not any(path.suffix == ".err" for path in present):
        wanted = ("log",)
    found = [path for path in present if path.suffix[1:] in wanted and node in (None, path.stem)]
    if node is not None and not found:
        hosts = sorted({path.stem for path in present if path.suffix[1:] in STREAMS})
        raise UserError(f"{run} has no log of {node}", hint=f"hosts: {', '.join(hosts) or 'none yet'}")
    return found


def sizes(found: list[Path]) -> dict[Path, int]:
    """The current size of each log."""
    return {path: path.stat().st_size for path in found}


def tail(path: Path, lines: int, size: int | None = None) -> list[str]:
    """The last lines of a log, or of its first `size` bytes. Reads only the end of the file."""
    path.open("rb").close()  # Raises if the log cannot be read.
    return [line for each in last_lines(path, lines, size) for line in shown(each, path.suffix)]


def shown(line: str, suffix: str) -> list[str]:
    """A line as it is safe to print on a terminal; a sample becomes one line per device."""
    return [without_control(each, "?") for each in (devices(line) if suffix == ".gpu" else [line])]


def devices(line: str) -> list[str]:
    """The lines of a sample, one per device: `[0] NVIDIA A10 | 49 C,  97 % |  9120 / 22731 MiB | 148 W | 1 process`."""
    try:
        sample = loads(line)
        return [_device(each) for each in sample["devices"]]
    except (ValueError, KeyError, TypeError, AttributeError):
        return []


def _device(device: dict[str, object]) -> str:
    def number(key: str, unit: str, width: int, scale: float = 1) -> str:
        value = device.get(key)
        return f"{value / scale:{width}.0f}{unit}" if isinstance(value, int | float) else f"{'-':>{width}}{unit}"

    mebi = float(1 << 20)
    memory = f"{number('memory_used', '', 6, mebi)} /{number('memory_total', ' MiB', 7, mebi)}"
    processes = device.get("processes")
    count = len(processes) if isinstance(processes, list) else 0
    running = f"{count} process{'' if count == 1 else 'es'}"
    return (
        f"[{device.get('index')}] {device.get('name')} | {number('temperature', ' C', 3)}, "
        f"{number('utilisation', ' %', 3)} | {memory} | {number('power', ' W', 4)} | {running}"
    )


def follow(
    find: Callable[[], list[Path]], is_over: Callable[[], bool], shown_to: dict[Path, int]
) -> Iterator[tuple[Path, str]]:
    """Yield lines appended to logs after `shown_to`, including logs of hosts that start later, until the run ends."""
    offsets = dict(shown_to)
    was_over, polled_at = False, -math.inf
    while True:
        if time.monotonic() - polled_at > SECONDS_BETWEEN_QUESTIONS:
            was_over, polled_at = is_over(), time.monotonic()
        for path in find():
            offsets.setdefault(path, 0)
            with open(path, "rb") as file:
                if file.seek(0, 2) < offsets[path]:  # A new launch truncated the file.
                    offsets[path] = 0
                file.seek(offsets[path])
                added = file.read()
            complete = len(added) if was_over else added.rfind(b"\n") + 1
            offsets[path] += complete
            for line in added[:complete].decode("utf-8", errors="replace").splitlines():
                for each in shown(line, path.suffix):
                    yield path, each
        if was_over:
            return
        time.sleep(SECONDS_BETWEEN_LOOKS)
