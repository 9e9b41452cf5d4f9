"""Rules for how a run ended, and whether it started.

The scheduler reports ends that no process could record. The manifest has the run's own view. If both report an end,
the worse one counts, and the message combines both.
"""

from __future__ import annotations

from typing import Any

from steelyard.core import units
from steelyard.core.errors import Interrupted
from steelyard.launch.backends import ENDED, WAITING, JobState
from steelyard.observe.error_scan import is_lost_peer
from steelyard.observe.known_errors import advice
from steelyard.observe.rules import Verdict, some
from steelyard.observe.rules.node_rules import described, lost_nodes
from steelyard.observe.run_state import RunState, seconds_of, span_of

RESUME = "the same command resumes from the last checkpoint"
ANEW = "the same command starts from step 0: no checkpoint was written yet"
# How a job ended: the kind of verdict, its message, and what to do.
ENDS = {
    JobState.OUT_OF_MEMORY: ("out-of-memory", "was killed for exceeding its memory limit",
                             "request more memory, lower train.micro_batch, or raise parallel.zero; " + RESUME),
    JobState.NODE_FAILED: ("node-failed", "lost a node",
                           "submit again; exclude the node if it fails again; " + RESUME),
    JobState.TIMED_OUT: ("timed-out", "reached its time limit",
                         "submit again, with a longer limit if possible; " + RESUME),
    JobState.PREEMPTED: ("preempted", "was pre-empted by another job", "submit again, or let it requeue; " + RESUME),
    JobState.CANCELLED: ("cancelled", "was cancelled", "if this was a mistake, submit again; " + RESUME),
    JobState.FAILED: ("failed", "failed", "read the first error below, or: steelyard logs RUN --stream err; " + RESUME),
}  # fmt: skip


def scheduler_ended(state: RunState) -> Verdict | None:
    """The scheduler reports that a job ended badly."""
    jobs = state.jobs
    states = {job: JobState(record["state"]) for job, record in jobs.items() if record["state"] in ENDS}
    if not states or state.is_waiting or (state.manifest.get("state") == "finished" and not state.is_live):
        return _finished_badly(state, states)
    job, end = min(states.items(), key=lambda item: list(ENDS).index(item[1]))
    record = jobs[job]
    kind, how, what_to_do = ENDS[end]
    exit_code = record.get("exit_code")
    code = f" with exit code {exit_code}" if end is JobState.FAILED and exit_code not in (None, "") else ""
    where = f" on {record['nodes']}" if record.get("nodes") else ""
    after = f" after {units.duration(span)}" if (span := span_of(record.get("elapsed"))) else ""
    if end is JobState.TIMED_OUT and (limit := span_of(record.get("time_limit"))):
        after = f" of {units.duration(limit)}"
    why = f" ({record['reason']})" if record.get("reason") not in (None, "", "None") else ""
    still = ", while other jobs of the run still run" if state.is_live else ""
    if end is JobState.FAILED and str(exit_code).partition(":")[0] == str(Interrupted.exit_code):
        kind, how, code, what_to_do = "interrupted", "was interrupted", "", RESUME
    lost = lost_nodes(state)
    if lost and end in (JobState.NODE_FAILED, JobState.FAILED):
        how += f": {described(lost)}"
    error = _error(state)
    cause = f"; error: {error}" if error and end is JobState.FAILED and not _is_reported(state, error) else ""
    message = f"job {job} {how}{code}{after}{where}{why}{still}{_reached(state)}{cause}"
    known = advice(error) if cause else ""
    return Verdict(kind, "wrong", message, known + what_to_do.replace(RESUME, _resume(state)))


def _finished_badly(state: RunState, states: dict[str, JobState]) -> Verdict | None:
    """All steps are done and saved, but the scheduler reports a failure: a process failed afterwards."""
    if not states or state.is_waiting:
        return None
    job, end = next(iter(states.items()))
    message = f"all steps are done, but job {job} {ENDS[end][1]} afterwards"
    return Verdict("failed-after-end", "warning", message, "the checkpoint is complete; see the end of the error log")


def run_ended(state: RunState) -> Verdict | None:
    """The end that the manifest records, if the scheduler reports no bad end."""
    if state.is_waiting or not state.job_states.isdisjoint(ENDS):
        return None
    ended = seconds_of(state.manifest.get("ended"))
    if state.is_live and (ended is None or ended < (state.began or 0.0)):
        return None  # The scheduler has restarted it since.
    known = str(state.manifest.get("state", ""))
    resume = _resume(state)
    if known == "finished":
        return Verdict(
            "completed", "ok", f"completed{_reached(state)}", "nothing; steelyard report RUN shows the details"
        )
    if known == "failed":
        why = _error(state) or "no reason recorded"
        return Verdict(
            "failed", "wrong", f"failed{_reached(state)}: {why}", f"{advice(why) or 'fix the error; '}{resume}"
        )
    if known == "interrupted":
        return Verdict("interrupted", "wrong", f"was interrupted{_reached(state)}", resume)
    if known == "stopped":
        return Verdict("stopped", "ok", f"stopped by train.max_hours{_reached(state)}", resume)
    if known == "running":
        where = state.manifest.get("host", "its host")
        what = f"check dmesg on {where} for the out-of-memory killer; {resume}"
        return Verdict("killed", "wrong", f"was killed: no process holds the run's lock{_reached(state)}", what)
    if state.job_states:
        return Verdict("completed", "ok", "the job completed", "nothing")
    return None


def not_started(state: RunState) -> Verdict | None:
    """The run is queued or requeued, or its ranks have not connected yet."""
    if state.is_waiting:
        return _queued(state)
    if state.job_states and state.job_states <= ENDED:
        return None
    known = state.manifest.get("state")
    if known in ("created", None) and not state.job_states:
        return Verdict("not-started", "waiting", "has not started", "start it: steelyard train or steelyard submit")
    has_recorded = bool(state.metrics) and (state.progressed or 0.0) >= (state.began or 0.0)
    if state.is_live and not has_recorded and "command" not in state.manifest:  # Other commands take no steps.
        since = f" for {units.duration(state.now - state.began)}" if state.began else ""
        done = "no step is done yet" if state.is_initialized else "no rank has reported yet"
        again = " again" if state.metrics else ""
        what = "wait: ranks connect, data is prepared and kernels are compiled"
        return Verdict("starting", "waiting", f"has been starting{again}{since}; {done}", what)
    return None


def _queued(state: RunState) -> Verdict:
    waiting = [(job, record) for job, record in state.jobs.items() if record["state"] in WAITING]
    job, record = next((each for each in waiting if each[1].get("missing")), waiting[0])
    reason = str(record.get("reason") or "no reason given")
    restarts = record.get("restarts") or 0
    again = f", after {restarts} restart{'s' if restarts != 1 else ''}" if restarts else ""
    is_held = record["state"] == JobState.HELD
    kind = "held" if is_held else "requeued" if again else "queued"
    lost = lost_nodes(state) if again else {}
    named = f"; {described(lost)}" if lost else ""
    message = f"job {job} is {record['state']}: {reason}{again}{named}"
    if needs := _missing_nodes(state, record):
        return Verdict(
            "cannot-start", "wrong", f"job {job} cannot start: {needs}{named}", str(record.get("hint") or "")
        )
    return Verdict(kind, "wrong" if is_held else "waiting", message, str(record.get("hint") or "wait"))


def _missing_nodes(state: RunState, record: dict[str, Any]) -> str:
    """Such as: needs 2 nodes of type a100, 1 is alive (b2 is down)."""
    missing = record.get("missing")
    if not isinstance(missing, dict) or not isinstance(missing.get("down"), list):
        return ""
    needed, alive, partition = missing.get("needed"), missing.get("alive"), missing.get("partition")
    partitions, placement = state.launch.get("partitions"), state.launch.get("placement")
    kind = f"of partition {partition}"
    if isinstance(partitions, list) and isinstance(placement, list) and partition in partitions[: len(placement)]:
        kind = f"of type {str(placement[partitions.index(partition)]).partition(':')[0]}"
    down = f" ({some([str(each) for each in missing['down']])})" if missing["down"] else ""
    return (
        f"needs {needed} node{'' if needed == 1 else 's'} {kind}, {alive} {'is' if alive == 1 else 'are'} alive{down}"
    )


def _error(state: RunState) -> str:
    """The run's own error; a lost peer is described in plain words instead of gloo's message."""
    error = str(state.manifest.get("error") or "").strip()
    if not is_lost_peer(error):
        return error
    lost = lost_nodes(state)
    return described(lost) if lost else "a rank lost its connection to another rank, which ended first"


def _is_reported(state: RunState, error: str) -> bool:
    """Whether the verdict on the error logs already contains the error."""
    return any(error.partition("\n")[0] in text for host in state.err for _, text in state.errors_of(host))


def _resume(state: RunState) -> str:
    """What the same command would do now. Runs of other commands have no checkpoints here."""
    if "command" in state.manifest or state.recipe is None:
        return RESUME
    names = [path.name.partition("-")[2] for path in (state.path / "checkpoints").glob("step-*")]
    steps = [int(name) for name in names if name.isdigit()]
    return (f"the same command resumes from step {max(steps)}" if steps else ANEW) + _in_memory(state)


def _in_memory(state: RunState) -> str:
    """Which memory checkpoints a run may have left on its nodes, and how to remove them."""
    recorded = state.manifest.get("memory_checkpoints")
    if not isinstance(recorded, dict) or not isinstance(hosts := recorded.get("hosts"), list) or not hosts:
        return ""
    folder = recorded.get("folder")
    return (
        f", or from a newer memory checkpoint in {folder} on {some(sorted(map(str, hosts)))}, if it is still there; "
        f"if you do not resume it: rm -r {folder} on each"
    )


def _reached(state: RunState) -> str:
    done = state.trained[-1]["step"] if state.trained else 0
    total = state.recipe.train.steps if state.recipe else None
    return f", at step {done}" + (f" of {total}" if total else "") if state.metrics or total else ""
