"""What each host printed, read back: the end of every log, and what is added while one looks.

`logs/<host>.out` and `.err` are text, `logs/<host>.gpu` are samples (see `gpu_monitor.py`), shown one line per device.
What ranks print is not trusted: control characters, with which a line could rewrite the terminal, are shown as `?`.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from steelyard.core.errors import UserError
from steelyard.core.safe_parse import loads
from steelyard.launch import backends, launch_record

STREAMS = ("out", "err", "gpu")
PRINTED = (
    "out",
    "err",
    "log",
)  # A `.log` is the launcher's own: of a job that ends before its ranks begin, all there is.
BYTES_TO_LOOK_BACK = 1 << 18
SECONDS_BETWEEN_LOOKS = 0.5
SECONDS_BETWEEN_QUESTIONS = 3.0  # to the scheduler, whether the run is over
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def paths(run: Path, node: str | None = None, stream: str | None = None) -> list[Path]:
    """The logs of a run, host by host."""
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
    """Where each log ends now."""
    return {path: path.stat().st_size for path in found}


def tail(path: Path, lines: int, size: int | None = None) -> list[str]:
    """The last lines of a log, or of its first `size` bytes, however long it is: only the end is read."""
    with open(path, "rb") as file:
        size = file.seek(0, 2) if size is None else size
        file.seek(max(0, size - BYTES_TO_LOOK_BACK))
        text = file.read(size - file.tell()).decode("utf-8", errors="replace")
    kept = text.splitlines()
    if size > BYTES_TO_LOOK_BACK and len(kept) > 1:
        kept = kept[1:]  # Its beginning was not read.
    return [line for each in kept[-lines:] for line in shown(each, path.suffix)] if lines else []


def shown(line: str, suffix: str) -> list[str]:
    """A line as it may stand on a terminal; a sample as one line per device."""
    return [clean(each) for each in (devices(line) if suffix == ".gpu" else [line])]


def clean(line: str) -> str:
    """The line without anything a terminal would obey."""
    return _CONTROL.sub("?", line.rstrip("\n"))


def devices(line: str) -> list[str]:
    """A sample, device by device, like `[0] NVIDIA A10 | 49 C,  97 % |  9120 / 22731 MiB | 148 W | 1 process`."""
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
    """Lines that are added to logs behind what was shown, those of hosts that join later too, until the run is over."""
    places = dict(shown_to)
    was_over, asked_at = False, -math.inf
    while True:
        if time.monotonic() - asked_at > SECONDS_BETWEEN_QUESTIONS:
            was_over, asked_at = is_over(), time.monotonic()
        for path in find():
            places.setdefault(path, 0)
            with open(path, "rb") as file:
                if file.seek(0, 2) < places[path]:  # A new launch began the file anew.
                    places[path] = 0
                file.seek(places[path])
                added = file.read()
            whole = len(added) if was_over else added.rfind(b"\n") + 1
            places[path] += whole
            for line in added[:whole].decode("utf-8", errors="replace").splitlines():
                for each in shown(line, path.suffix):
                    yield path, each
        if was_over:
            return
        time.sleep(SECONDS_BETWEEN_LOOKS)
