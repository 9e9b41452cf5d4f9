"""How long the steps of a run took: the last ones, and a median for every minute of the last half hour.

Records of short steps are many, and `RunState` keeps only the last of them. Durations are per sample of the global
batch, which may grow during a run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from statistics import median
from typing import Any

from steelyard.core.medians import weighted_median
from steelyard.observe.host_logs import is_number

KEPT_STEPS, KEPT_MINUTES, KEPT_IN_MINUTE = 1024, 30, 120
SETTLED = 2  # records after a start that do not count: kernels are compiled, caches are filled
MINUTE = 60.0
PAUSE = 10 * MINUTE  # a longer one is a restart


class StepTimes:
    """Fed with all records, in order."""

    def __init__(self) -> None:
        self._recent: deque[tuple[float, float, float]] = deque(maxlen=KEPT_STEPS)
        self._minutes: deque[tuple[float, deque[float]]] = deque(maxlen=KEPT_MINUTES)
        self._unsettled, self._step = SETTLED, -1

    def last(self, seconds: float, least: int) -> float | None:
        """The median of the last records, each counted as long as it lasted; None with fewer than `least`."""
        if len(self._recent) < least:
            return None
        newest = self._recent[-1][0]
        recent = [each for each in self._recent if newest - each[0] <= seconds]
        recent = recent if len(recent) >= least else list(self._recent)[-least:]
        return weighted_median([each for _, _, each in recent], [lasted for _, lasted, _ in recent])

    def minutes(self, since: float) -> list[tuple[float, float]]:
        """The end of each minute from a time on, and the median duration of its steps."""
        return [(begin + MINUTE, median(each)) for begin, each in self._minutes if begin >= since]

    def add(self, records: Iterable[dict[str, Any]]) -> None:
        """Add new records. Those without a duration, such as validations, do not count."""
        for record in records:
            at, seconds, batch = record.get("time"), record.get("seconds"), record.get("global_batch")
            if not is_number(at) or not is_number(seconds):
                continue
            if record["step"] <= self._step or (self._recent and at - self._recent[-1][0] > PAUSE):
                self._unsettled = SETTLED
            self._step = record["step"]
            if self._unsettled > 0:
                self._unsettled -= 1
                continue
            each = seconds / (batch if is_number(batch) and batch > 0 else 1.0)
            lasted = at - self._recent[-1][0] if self._recent else 0.0
            self._recent.append((float(at), min(max(lasted, 0.0), MINUTE), each))
            if not self._minutes or at >= self._minutes[-1][0] + MINUTE:
                self._minutes.append((float(at), deque(maxlen=KEPT_IN_MINUTE)))
            self._minutes[-1][1].append(each)
