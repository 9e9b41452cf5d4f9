"""How a trial ended, told apart, because what to learn from it differs."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from steelyard.launch.backends import JobState

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
CUT_SHORT = "cut_short"
SURPLUS = "surplus"

RAN = (FINISHED, OUT_OF_MEMORY, CRASHED, HUNG, TIMED_OUT, STOPPED_EARLY)
"""What counts as a trial of the budget."""
REJECTED = (PRUNED_BY_PLAN, BREAKS_CONSTRAINT, REPEATED)
"""Points that were not run, because it is known what would come of it."""
VOID = (LOST, INTERRUPTED, CUT_SHORT, SURPLUS)
"""Runs that say nothing about their point: their worker was killed, told to stop, or out of the study's time."""

NOT_ITS_OWN = {
    JobState.NODE_FAILED: "its node failed",
    JobState.PREEMPTED: "another job took its place",
    JobState.CANCELLED: "somebody cancelled its job",
}
"""Ends of a job that say nothing about its point."""

_MEMORY = re.compile(
    r"out[ _]of[ _]memory|OutOfMemoryError|cudaErrorMemoryAllocation|CUBLAS_STATUS_ALLOC_FAILED"
    r"|\bMemoryError\b|std::bad_alloc|oom[-_ ]kill"
    r"|can't allocate memory|Cannot allocate memory|NCCL.{0,40}Cuda failure.{0,20}memory",
    re.IGNORECASE,
)
# A hint that memory may have run out, not a finding: launch/root_cause.py asks it of every SIGKILL.
_ONLY_ASKED = re.compile(r"out of memory\? see dmesg")
_ERROR = re.compile(r"^(?:\w*: )?(error: .+|\w*(?:Error|Exception)\b.*)")


@dataclass(frozen=True)
class TrialEnd:
    """How a trial ended, why in a line, and after how many seconds."""

    outcome: str
    reason: str
    seconds: float


def kills_by_memory(root: Path = Path("/")) -> int:
    """How often the kernel has killed for want of memory in this process's control group; 0 where it does not say."""
    for events in _memory_events(root):
        try:
            found = re.search(r"^oom_kill (\d+)", events.read_text(), re.MULTILINE)
        except OSError:
            continue
        if found:
            return int(found[1])
    return 0


def _memory_events(root: Path) -> Iterator[Path]:
    """Where the kernel counts: the group's own files (a scheduler's job), a container's, and the whole machine."""
    groups = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    for _, kinds, path in (line.split(":", 2) for line in lines if line.count(":") >= 2):
        if not kinds:
            yield groups / path.strip("/") / "memory.events"
        elif "memory" in kinds.split(","):
            yield groups / "memory" / path.strip("/") / "memory.oom_control"
    yield from (groups / "memory.events", groups / "memory" / "memory.oom_control", root / "proc/vmstat")


def of_silence(missing: str, tail: Sequence[str]) -> tuple[str, str]:
    """Outcome and reason of a command that ended well without its numbers: a pipe (`| tee`) hides what went before."""
    short = _short_of_memory(tail)
    if short is not None:
        return OUT_OF_MEMORY, short
    return CRASHED, f"it ended well, but {missing}"


def of_exit(code: int, tail: Sequence[str], was_killed_by_memory: bool) -> tuple[str, str]:
    """Outcome and reason of a command that ended by itself with an error."""
    short = _short_of_memory(tail)
    if short is not None or was_killed_by_memory:
        return OUT_OF_MEMORY, short or "the kernel killed it for want of memory"
    said = reason_in(tail)
    if code > 128:
        return CRASHED, f"{_code(code)}; it said last: {said}" if said else _code(code)
    return CRASHED, said or _code(code)


def of_state(state: JobState, code: int | None, tail: Sequence[str]) -> tuple[str, str] | None:
    """Outcome and reason of a job by its last state; None where it finished."""
    if state is JobState.FINISHED:
        return None
    if state is JobState.OUT_OF_MEMORY:
        return OUT_OF_MEMORY, _short_of_memory(tail) or "the scheduler ended it for want of memory"
    if state is JobState.TIMED_OUT:
        return TIMED_OUT, "the scheduler ended it at its time limit"
    if state in NOT_ITS_OWN:
        return LOST, NOT_ITS_OWN[state]
    return of_exit(code or 1, tail, False)


def _short_of_memory(tail: Sequence[str]) -> str | None:
    """The line that says so."""
    return next((line.strip()[:300] for line in tail if _MEMORY.search(_ONLY_ASKED.sub("", line))), None)


def reason_in(tail: Sequence[str]) -> str:
    """The line that says why, as far as one can tell: the last error, or else the last line."""
    errors = [match[1] for line in tail if (match := _ERROR.match(line.strip()))]
    said = [line.strip() for line in tail if any(map(str.isalnum, line))]  # mpirun draws lines around what it says.
    return (errors or said or [""])[-1].removeprefix("error: ")[:300]


def _code(code: int) -> str:
    if code > 128:
        try:
            return f"killed by {signal.Signals(code - 128).name}"
        except ValueError:
            pass
    return f"exit code {code}"
