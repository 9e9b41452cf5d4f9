"""What one host writes while a run lives: its output, its errors, and samples of its devices."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from steelyard.observe.error_scan import Complaints, clean
from steelyard.observe.tail import Tail, records

KEPT_SAMPLES, KEPT_LINES = 60, 12
NUMBERS = ("temperature", "utilisation", "memory_used", "memory_total", "power")  # of a device


@dataclass
class HostLog:
    """One host's stream: its last lines, and for standard error what it complained of.

    The end is read first, since it tells how the run stands. What a look leaves out is made up for piece by piece, from
    the beginning on, since the first error is the one to name.
    """

    tail: Tail
    complaints: Complaints | None
    complained: float = 0.0
    """When the last of its errors was written, at the latest: other lines may have come with it, not those after."""
    raw: deque[bytes] = field(default_factory=lambda: deque(maxlen=KEPT_LINES))
    _earlier: Complaints = field(default_factory=Complaints)

    def refresh(self) -> int:
        """Read on; returns how many bytes were new."""
        new, is_new = self.tail.chunk()
        if is_new:
            self.raw.clear()
            self._earlier.forget()
            if self.complaints is not None:
                self.complaints.forget()
        self.raw.extend(line for line in new.rsplit(b"\n", KEPT_LINES + 1)[-KEPT_LINES - 1 : -1] if line.strip())
        if self.complaints is not None and new:
            before = self.complaints.count
            self.complaints.look(new, self.tail.begins)
            if self.complaints.count > before:
                self.complained = self.tail.changed or 0.0
        return len(new)

    def errors(self, since: int) -> list[tuple[int, str]]:
        """The errors behind a place in the file, each with its own, in order."""
        found = self.complaints.found if self.complaints is not None else []
        return [each for each in sorted([*self._earlier.found, *found]) if each[0] >= since]

    def unread(self, since: int) -> int:
        """Bytes behind a place in the file that no look has gone through."""
        return 0 if self.complaints is None else sum(max(0, end - max(begin, since)) for begin, end in self.tail.gaps)

    def catch_up(self, since: int, most: int) -> int:
        """Look through some of what was left out behind a place in the file; returns how many bytes it were."""
        chunk, begins = self.tail.fill(since, most)
        if begins != self._earlier.looked:
            self._earlier.begin_anew()  # Another gap: what was announced in the last one is not told here.
        before = self._earlier.count
        self._earlier.look(chunk, begins)
        if self._earlier.count > before and not self.complained:
            self.complained = self.tail.changed or 0.0
        return len(chunk)

    def last(self, number: int) -> list[str]:
        """The last lines, as text that can do no harm."""
        return [clean(line) for line in list(self.raw)[-number:]]


@dataclass
class GpuSamples:
    """What one host says of its devices, newest last."""

    tail: Tail
    samples: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=KEPT_SAMPLES))

    def refresh(self) -> None:
        """Read on."""
        new, is_new = self.tail.lines()
        if is_new:
            self.samples.clear()
        self.samples.extend(map(_sample, (one for one in records(new[-KEPT_SAMPLES:]) if is_number(one.get("time")))))

    @property
    def last(self) -> dict[str, Any]:
        """The newest sample; empty before there is one."""
        return self.samples[-1] if self.samples else {}

    @property
    def heard(self) -> float:
        """When the newest sample came, by the clock of the filesystem: the host's own may be wrong by hours."""
        return self.tail.changed or float(self.last.get("time", 0.0))

    @property
    def behind(self) -> float:
        """By how much the host's clock is behind the filesystem's, while it samples."""
        return self.heard - float(self.last["time"]) if self.samples else 0.0

    def when_logged(self, place: int) -> float | None:
        """The host's time at which its error log was longer than that for the first time, as far as samples tell."""
        sizes = [(sample["logged"], sample["time"]) for sample in self.samples if is_number(sample.get("logged"))]
        after = bisect_right(sizes, place, key=lambda each: each[0])
        return float(sizes[after][1]) if after < len(sizes) else None


def is_number(value: Any) -> TypeGuard[float]:
    """Whether a field that somebody else wrote is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < float("inf")


def _sample(reported: dict[str, Any]) -> dict[str, Any]:
    """A sample whose fields are what they should be, or not there: readers need not ask again."""
    listed = reported["devices"] if isinstance(reported.get("devices"), list) else []
    devices = [each for each in listed if isinstance(each, dict)]
    for device in devices:
        for key in NUMBERS:
            if key in device and not is_number(device[key]):
                device[key] = None
        if not isinstance(device.get("processes"), list):
            device["processes"] = []
    return reported | {"devices": devices}
