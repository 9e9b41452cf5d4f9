"""How a trial ended, told apart, because what to learn from it differs."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

FINISHED = "finished"
OUT_OF_MEMORY = "out_of_memory"
CRASHED = "crashed"
HUNG = "hung"
TIMED_OUT = "timed_out"
STOPPED_EARLY = "stopped_early"
PRUNED_BY_PLAN = "pruned_by_plan"
BREAKS_CONSTRAINT = "breaks_constraint"
REPEATED = "repeated"
LOST = "lost"
INTERRUPTED = "interrupted"
SURPLUS = "surplus"

RAN = (FINISHED, OUT_OF_MEMORY, CRASHED, HUNG, TIMED_OUT, STOPPED_EARLY)
"""What counts as a trial of the budget."""
REJECTED = (PRUNED_BY_PLAN, BREAKS_CONSTRAINT, REPEATED)
"""Points that were not run, because it is known what would come of it."""
VOID = (LOST, INTERRUPTED, SURPLUS)
"""Runs that say nothing about their point: their worker was killed, or told to stop."""

_MEMORY = re.compile(
    r"out of memory|OutOfMemoryError|CUBLAS_STATUS_ALLOC_FAILED|\bMemoryError\b|std::bad_alloc|oom[-_ ]kill"
    r"|can't allocate memory|Cannot allocate memory|NCCL.{0,40}Cuda failure.{0,20}memory",
    re.IGNORECASE,
)
# A hint that memory may have run out, not a finding: launch/blame.py asks it of every SIGKILL.
_ONLY_ASKED = re.compile(r"out of memory\? see dmesg")
_ERROR = re.compile(r"^(?:\w*: )?(error: .+|\w*(?:Error|Exception)\b.*)")


@dataclass(frozen=True)
class Ended:
    """How a trial ended, why in a line, and after how many seconds."""

    outcome: str
    reason: str
    seconds: float


def kills_by_memory() -> int:
    """How often the kernel has killed for want of memory in this process's control group; 0 where it does not say."""
    for events in (Path("/sys/fs/cgroup/memory.events"), Path("/sys/fs/cgroup/memory/memory.oom_control")):
        try:
            found = re.search(r"^oom_kill (\d+)", events.read_text(), re.MULTILINE)
        except OSError:
            continue
        if found:
            return int(found[1])
    return 0


def of_exit(code: int, tail: Sequence[str], was_killed_by_memory: bool) -> tuple[str, str]:
    """Outcome and reason of a command that ended by itself with an error."""
    short = next((line for line in tail if _MEMORY.search(_ONLY_ASKED.sub("", line))), None)
    if short is not None or was_killed_by_memory:
        return OUT_OF_MEMORY, (short or "the kernel killed it for want of memory").strip()[:300]
    said = reason_in(tail)
    if code > 128:
        return CRASHED, f"{_code(code)}; it said last: {said}" if said else _code(code)
    return CRASHED, said or _code(code)


def reason_in(tail: Sequence[str]) -> str:
    """The line that says why, as far as one can tell: the last error, or else the last line."""
    errors = [match[1] for line in tail if (match := _ERROR.match(line.strip()))]
    said = [line.strip() for line in tail if line.strip()]
    return (errors or said or [""])[-1].removeprefix("error: ")[:300]


def _code(code: int) -> str:
    if code > 128:
        try:
            return f"killed by {signal.Signals(code - 128).name}"
        except ValueError:
            pass
    return f"exit code {code}"
