"""The outcomes of trials. They are distinguished because the sampler learns something different from each."""

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
"""Outcomes that count against the budget."""
REJECTED = (PRUNED_BY_PLAN, BREAKS_CONSTRAINT, REPEATED)
"""Points that were not run, because their outcome is known."""
VOID = (LOST, INTERRUPTED, CUT_SHORT, SURPLUS)
"""Runs without a result for their point: the worker was killed or interrupted, or the study's time was over."""

NOT_ITS_OWN = {
    JobState.NODE_FAILED: "its node failed",
    JobState.PREEMPTED: "preempted by another job",
    JobState.CANCELLED: "its job was cancelled",
}
"""Ends of a job that are independent of its point."""

_MEMORY = re.compile(
    r"out[ _]of[ _]memory|OutOfMemoryError|cudaErrorMemoryAllocation|CUBLAS_STATUS_ALLOC_FAILED"
    r"|\bMemoryError\b|std::bad_alloc|oom[-_ ]kill"
    r"|can't allocate memory|Cannot allocate memory|NCCL.{0,40}Cuda failure.{0,20}memory",
    re.IGNORECASE,
)
# Only a hint that memory may have run out: launch/root_cause.py prints it for every SIGKILL.
_ONLY_HINT = re.compile(r"out of memory\? see dmesg")
_ERROR = re.compile(r"^(?:\w*: )?(error: .+|\w*(?:Error|Exception)\b.*)")


@dataclass(frozen=True)
class TrialEnd:
    """Outcome, reason in one line, and duration of a trial."""

    outcome: str
    reason: str
    seconds: float


def kills_by_memory(root: Path = Path("/")) -> int:
    """Number of OOM kills in this process's control group; 0 if unknown."""
    for events in _memory_events(root):
        try:
            match = re.search(r"^oom_kill (\d+)", events.read_text(), re.MULTILINE)
        except OSError:
            continue
        if match:
            return int(match[1])
    return 0


def _memory_events(root: Path) -> Iterator[Path]:
    """Files with the kernel's counters: of the control group (a scheduler's job), of a container, of the machine."""
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
    """Outcome and reason of a command with exit code 0 but without values: a pipe (`| tee`) hides the exit code."""
    short = _short_of_memory(tail)
    if short is not None:
        return OUT_OF_MEMORY, short
    return CRASHED, f"exit code 0, but {missing}"


def of_exit(code: int, tail: Sequence[str], was_killed_by_memory: bool) -> tuple[str, str]:
    """Outcome and reason of a command that ended with an error."""
    short = _short_of_memory(tail)
    if short is not None or was_killed_by_memory:
        return OUT_OF_MEMORY, short or "killed by the kernel: out of memory"
    reason = reason_in(tail)
    if code > 128:
        return CRASHED, f"{_code(code)}; last output: {reason}" if reason else _code(code)
    return CRASHED, reason or _code(code)


def of_state(state: JobState, code: int | None, tail: Sequence[str]) -> tuple[str, str] | None:
    """Outcome and reason of a job by its last state; None if it finished."""
    if state is JobState.FINISHED:
        return None
    if state is JobState.OUT_OF_MEMORY:
        return OUT_OF_MEMORY, _short_of_memory(tail) or "killed by the scheduler: out of memory"
    if state is JobState.TIMED_OUT:
        return TIMED_OUT, "killed by the scheduler: time limit"
    if state in NOT_ITS_OWN:
        return LOST, NOT_ITS_OWN[state]
    return of_exit(code or 1, tail, False)


def _short_of_memory(tail: Sequence[str]) -> str | None:
    """The line that reports an out-of-memory error."""
    return next((line.strip()[:300] for line in tail if _MEMORY.search(_ONLY_HINT.sub("", line))), None)


def reason_in(tail: Sequence[str]) -> str:
    """The likely reason: the last error, or else the last line."""
    errors = [match[1] for line in tail if (match := _ERROR.match(line.strip()))]
    lines = [line.strip() for line in tail if any(map(str.isalnum, line))]  # Skips rulers that mpirun prints.
    return (errors or lines or [""])[-1].removeprefix("error: ")[:300]


def _code(code: int) -> str:
    if code > 128:
        try:
            return f"killed by {signal.Signals(code - 128).name}"
        except ValueError:
            pass
    return f"exit code {code}"
