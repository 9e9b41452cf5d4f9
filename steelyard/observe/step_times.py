"""How long the steps of a run took: the last ones, and a median for every minute of the last half hour.

Records of short steps are many, and `RunState` keeps only the last of them. Durations are per sample of the global
batch, which may grow during a run. On a CPU there is a second duration without the time in which ranks waited for a
core that other processes used: a shared machine is not a fault of the run. A rank that alone gets too few cores is
found by comparing the ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from statistics import median
from typing import Any, NamedTuple

from steelyard.core.medians import weighted_median
from steelyard.observe.host_logs import is_number

KEPT_STEPS, KEPT_MINUTES, KEPT_IN_MINUTE = 1024, 30, 120
SETTLED = 2  # records after a start that do not count: kernels are compiled, caches are filled
MINUTE = 60.0
PAUSE = 10 * MINUTE  # a longer one is a restart


class Duration(NamedTuple):
    """Seconds per sample: in all, and without waiting for a core."""

    whole: float
    own: float


class StepTimes:
    """Fed with all records, in order."""

    def __init__(self) -> None:
        self._recent: deque[tuple[float, float, Duration]] = deque(maxlen=KEPT_STEPS)  # time, how long it lasted
        self._minutes: deque[tuple[float, deque[Duration]]] = deque(maxlen=KEPT_MINUTES)
        self._unsettled, self._step = SETTLED, -1

    def last(self, seconds: float, least: int) -> Duration | None:
        """The median of the last records, each counted as long as it lasted; None with fewer than `least`."""
        if len(self._recent) < least:
            return None
        newest = self._recent[-1][0]
        recent = [each for each in self._recent if newest - each[0] <= seconds]
        recent = recent if len(recent) >= least else list(self._recent)[-least:]
        weights = [lasted for _, lasted, _ in recent]
        return Duration(*(weighted_median(each, weights) for each in zip(*(row for *_, row in recent), strict=True)))

    def minutes(self, since: float) -> list[tuple[float, Duration]]:
        """The end of each minute from a time on, and the median duration of its steps."""
        return [
            (begin + MINUTE, Duration(*map(median, zip(*each, strict=True))))
            for begin, each in self._minutes
            if begin >= since
        ]

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
            samples = batch if is_number(batch) and batch > 0 else 1.0
            each = Duration(seconds / samples, _own(record, seconds) / samples)
            lasted = at - self._recent[-1][0] if self._recent else 0.0
            self._recent.append((float(at), min(max(lasted, 0.0), MINUTE), each))
            if not self._minutes or at >= self._minutes[-1][0] + MINUTE:
                self._minutes.append((float(at), deque(maxlen=KEPT_IN_MINUTE)))
            self._minutes[-1][1].append(each)


def _own(record: dict[str, Any], seconds: float) -> float:
    """Without the waits for a core, which at worst come one after the other."""
    reported = record.get("rank_seconds")
    waited = reported.get("core_wait") if isinstance(reported, dict) else None
    return max(seconds - waited, 0.1 * seconds) if is_number(waited) else seconds
