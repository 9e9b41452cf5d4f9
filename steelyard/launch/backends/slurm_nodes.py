"""Whether enough nodes of a partition are alive for a job that waits. Slurm's own reason is often only `Resources`."""

from __future__ import annotations

from steelyard.core.host import output_of
from steelyard.launch.backends import WAITING, JobState, Record

# States of sinfo in which a node takes no job until somebody acts. A star means that the node does not respond.
UNUSABLE = ("down", "drain", "fail", "error", "unknown", "inval", "blocked")


def with_missing_nodes(record: Record) -> Record:
    """The record without fields of squeue that only this function needs; with `missing` if too few nodes are alive."""
    partition, needed = record.get("partition"), record.get("needed") or 0
    record = {key: value for key, value in record.items() if key not in ("partition", "needed")}
    if record["state"] not in WAITING - {JobState.SUSPENDED} or not partition or not needed or "," in partition:
        return record  # A job for several partitions can start in any of them.
    states = states_of(f"--partition={partition}")
    down = {node: state for node, state in states.items() if state.startswith(UNUSABLE) or state.endswith("*")}
    alive = len(states) - len(down)
    if not states or needed <= alive:
        return record
    missing = {"partition": partition, "needed": needed, "alive": alive, "down": _described(down)}
    if down:
        hint = f"wait until {'it returns' if len(down) == 1 else 'they return'} (sinfo -R has the reason)"
        hint += ", or submit again for fewer nodes"
    else:
        hint = f"submit again for at most {alive} nodes, or for another partition: sinfo"
    return record | {"missing": missing, "hint": hint}


def _described(down: dict[str, str]) -> list[str]:
    """Such as `b2 is down`."""
    words = {node: state.rstrip("*~#!%$@^-+") for node, state in sorted(down.items())}
    return [f"{node} {'does not respond' if not state.startswith(UNUSABLE) else f'is {state}'}"
            for node, state in words.items()]  # fmt: skip


def states_of(*options: str) -> dict[str, str]:
    """The state of each node that sinfo lists with these options; empty without an answer."""
    answer = output_of(["sinfo", "--noheader", "--Node", *options, "--format=%N|%T"]) or ""
    return dict(line.strip().split("|", 1) for line in answer.splitlines() if "|" in line)
