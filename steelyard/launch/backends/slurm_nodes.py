"""Whether enough nodes of a partition are alive for a job that waits. Slurm's own reason is often only `Resources`."""

from __future__ import annotations

import subprocess

from steelyard.launch.backends import WAITING, JobState, Record

SECONDS_TO_ANSWER = 30
# States of sinfo in which a node takes no job until somebody acts. A star means that the node does not respond.
UNUSABLE = ("down", "drain", "fail", "error", "unknown", "inval", "blocked")


def with_missing_nodes(record: Record) -> Record:
    """The record without fields of squeue that only this function needs; with `missing` if too few nodes are alive."""
    partition, needed = record.get("partition"), record.get("needed") or 0
    record = {key: value for key, value in record.items() if key not in ("partition", "needed")}
    if record["state"] not in WAITING - {JobState.SUSPENDED} or not partition or not needed or "," in partition:
        return record  # A job for several partitions can start in any of them.
    answer = ask(["sinfo", "--noheader", "--Node", f"--partition={partition}", "--format=%N|%T"])[0]
    states = dict(line.split("|", 1) for line in answer.splitlines() if "|" in line)
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


def ask(command: list[str]) -> tuple[str, str]:
    """The standard output of a program, or its standard error if it failed."""
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS_TO_ANSWER)
    except (OSError, subprocess.SubprocessError):
        return "", ""
    return (answer.stdout, "") if answer.returncode == 0 else ("", answer.stderr)
