"""Rules about lost nodes: without power or network, or with a killed node agent.

All ranks wait in a collective for the ranks of a lost node, and end minutes later, or when the scheduler ends the job.
The heartbeats of the nodes show it after seconds (`launch/heartbeat.py`). Runs without heartbeats are judged by their
samples.
"""

from __future__ import annotations

import re
import time

from steelyard.observe.error_scan import is_lost_peer
from steelyard.observe.rules import Verdict, some
from steelyard.observe.run_state import RunState

LOST_AFTER = 8.0  # seconds without a heartbeat, while other nodes have theirs
LOST_AFTER_ERROR = 4.0  # if a rank of another node lost a connection, too
SILENT_FOR = 90.0  # seconds without a sample, in runs without heartbeats
NODE_FAILURE = re.compile(r"\bNode failure on ([\w.-]+)")  # srun's message


def lost_node(state: RunState) -> Verdict | None:
    """A node of a live run does not answer."""
    lost = lost_nodes(state) if state.is_live else {}
    if not lost:
        return None
    host = min(lost, key=lambda each: lost[each])
    is_elastic = bool(state.attempts) and "attempt" in state.attempts[-1]
    next_ = "the run continues on the nodes that remain" if is_elastic else "the scheduler requeues the job"
    what = f"check whether it is up: ping {host}; if it is down, {next_}"
    return Verdict("lost-node", "wrong", described(lost), what)


def waits_for_nodes(state: RunState) -> Verdict | None:
    """An elastic run has too few nodes, no layout for those that remain, or a lost node still holds its lock."""
    is_here = state.is_live and not state.is_superseded
    waiting = state.attempts[-1].get("waiting") if is_here and state.attempts else None
    if not isinstance(waiting, str):
        return None
    what = "wait for the file server" if " is in use by " in waiting else "bring nodes back"
    return Verdict("waits-for-nodes", "waiting", f"waits: {waiting}", f"{what}; it continues by itself")


def described(lost: dict[str, float]) -> str:
    """Such as: b2 does not answer since 12:03:07."""
    first = time.strftime("%H:%M:%S", time.localtime(min(lost.values())))
    verb = "does" if len(lost) == 1 else "do"
    return f"{some(sorted(lost))} {verb} not answer since {first}"


def lost_nodes(state: RunState) -> dict[str, float]:
    """The nodes that were lost in the last attempt, and when each was last alive.

    A host that trained after its last heartbeat is not lost: every step needs all ranks.
    """
    hosts, begun = (state.hosts if state.is_initialized else {}), state.began or 0.0
    beats = {host: at for host, at in state.beats.items() if host in hosts or at >= begun}
    limit = LOST_AFTER_ERROR if _has_lost_peer(state) else LOST_AFTER
    if not beats:
        beats = {host: samples.heard for host, samples in state.devices.items() if samples.samples}
        beats = {host: at for host, at in beats.items() if host in hosts or at >= begun}
        limit = SILENT_FOR
    progressed = state.progressed or 0.0
    return {
        host: at
        for host, at in beats.items()
        if _heard_of_others(state, beats, host) - at > limit and progressed - at <= limit
    } | _named_by_scheduler(state)


def _heard_of_others(state: RunState, beats: dict[str, float], host: str) -> float:
    """When another node was last alive. Nodes whose agents have ended in order have only their samples."""
    others = [at for name, at in beats.items() if name != host]
    others += [samples.heard for name, samples in state.devices.items() if name != host and samples.samples]
    return max(others, default=0.0)


def _has_lost_peer(state: RunState) -> bool:
    return any(is_lost_peer(text) for host in state.err for _, text in state.errors_of(host))


def _named_by_scheduler(state: RunState) -> dict[str, float]:
    """Nodes that srun reports as failed."""
    return {
        found[1]: state.beats.get(found[1], state.written(host, place))
        for host in state.err
        for place, text in state.errors_of(host)
        if (found := NODE_FAILURE.search(text))
    }
