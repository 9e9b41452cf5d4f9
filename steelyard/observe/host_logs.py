"""The files that one host writes during a run: standard output, standard error, and GPU samples."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from steelyard.core.safe_parse import json_objects
from steelyard.observe.error_scan import ErrorScan, clean
from steelyard.observe.tail import Tail

KEPT_SAMPLES, KEPT_LINES = 60, 12
NUMBERS = ("temperature", "utilisation", "memory_used", "memory_total", "power")  # of a device


@dataclass
class HostLog:
    """One output stream of a host: its last lines and, for standard error, its errors.

    The end is read first, because it shows the current state of the run. Skipped parts are read later in pieces, from
    the beginning, because the first error is the one to report.
    """

    tail: Tail
    error_scan: ErrorScan | None
    last_error_at: float = 0.0
    """Upper bound of the time of the last error: the mtime of the file when the error was read."""
    raw: deque[bytes] = field(default_factory=lambda: deque(maxlen=KEPT_LINES))
    _earlier: ErrorScan = field(default_factory=ErrorScan)

    def refresh(self) -> int:
        """Read new data; returns the number of new bytes."""
        new, is_new = self.tail.chunk()
        if is_new:
            self.raw.clear()
            self._earlier.forget()
            if self.error_scan is not None:
                self.error_scan.forget()
        self.raw.extend(line for line in new.rsplit(b"\n", KEPT_LINES + 1)[-KEPT_LINES - 1 : -1] if line.strip())
        if self.error_scan is not None and new:
            before = self.error_scan.count
            self.error_scan.scan(new, self.tail.begins)
            if self.error_scan.count > before:
                self.last_error_at = self.tail.changed or 0.0
        return len(new)

    def errors(self, since: int) -> list[tuple[int, str]]:
        """The errors from file offset `since` on, with their offsets, in order."""
        recent = self.error_scan.found if self.error_scan is not None else []
        return [each for each in sorted([*self._earlier.found, *recent]) if each[0] >= since]

    def unread(self, since: int) -> int:
        """Number of bytes from file offset `since` on that were not scanned."""
        return 0 if self.error_scan is None else sum(max(0, end - max(begin, since)) for begin, end in self.tail.gaps)

    def catch_up(self, since: int, most: int) -> int:
        """Scan at most `most` of the skipped bytes from offset `since` on; returns the number of scanned bytes."""
        chunk, begins = self.tail.fill(since, most)
        if begins != self._earlier.scanned_to:
            self._earlier.begin_anew()  # Another gap: a traceback of the last one does not continue here.
        before = self._earlier.count
        self._earlier.scan(chunk, begins)
        if self._earlier.count > before and not self.last_error_at:
            self.last_error_at = self.tail.changed or 0.0
        return len(chunk)

    def last(self, number: int) -> list[str]:
        """The last lines, without terminal control sequences."""
        return [clean(line) for line in list(self.raw)[-number:]]


@dataclass
class GpuSamples:
    """GPU samples of one host, newest last."""

    tail: Tail
    samples: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=KEPT_SAMPLES))

    def refresh(self) -> None:
        """Read new samples."""
        new, is_new = self.tail.lines()
        if is_new:
            self.samples.clear()
        self.samples.extend(_sample(each) for each in json_objects(new[-KEPT_SAMPLES:]) if is_number(each.get("time")))

    @property
    def last(self) -> dict[str, Any]:
        """The newest sample; empty if there is none yet."""
        return self.samples[-1] if self.samples else {}

    @property
    def heard(self) -> float:
        """Time of the newest sample by the filesystem's clock. The host's own clock may be wrong by hours."""
        return self.tail.changed or float(self.last.get("time", 0.0))

    @property
    def behind(self) -> float:
        """Seconds by which the host's clock is behind the filesystem's. Valid while the host samples."""
        return self.heard - float(self.last["time"]) if self.samples else 0.0

    def when_logged(self, place: int) -> float | None:
        """Host time of the first sample at which the error log was longer than offset `place`; None if unknown."""
        sizes = [(sample["logged"], sample["time"]) for sample in self.samples if is_number(sample.get("logged"))]
        after = bisect_right(sizes, place, key=lambda each: each[0])
        return float(sizes[after][1]) if after < len(sizes) else None


def is_number(value: Any) -> TypeGuard[float]:
    """Whether a field of an untrusted file is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < float("inf")


def _sample(reported: dict[str, Any]) -> dict[str, Any]:
    """The sample with fields of the wrong type removed or set to None, so that readers need no checks."""
    listed = reported["devices"] if isinstance(reported.get("devices"), list) else []
    devices = [each for each in listed if isinstance(each, dict)]
    for device in devices:
        for key in NUMBERS:
            if key in device and not is_number(device[key]):
                device[key] = None
        if not isinstance(device.get("processes"), list):
            device["processes"] = []
    return reported | {"devices": devices}
