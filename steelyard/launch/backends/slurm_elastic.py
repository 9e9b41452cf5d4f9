"""The nodes of an elastic job on Slurm: which it has, which are drained, and a job step for each.

`sbatch --no-kill` keeps the job when a node is lost. Slurm removes the node from the job when it declares it down
(SlurmdTimeout); until then a step there hangs, so a lost node is used again only after a probe. Each node has a step of
its own, because a step over several nodes does not start if one of them does not answer. Steps overlap: the step of a
lost attempt keeps its resources until Slurm has ended it.
"""

from __future__ import annotations

from collections.abc import Mapping

from steelyard.core.host import output_of
from steelyard.launch.backends.slurm_nodes import UNUSABLE, states_of
from steelyard.launch.elastic_job import ElasticJob, Node
from steelyard.parallel.rendezvous import expand

SECONDS_TO_PROBE = 15


def allocated(job: ElasticJob, environ: Mapping[str, str]) -> list[Node]:
    """The nodes of the job in rank order. Without an answer of squeue: those that it started with."""
    found = []
    for number, group in enumerate(job.groups):
        names = _of_part(job, number, "%N", environ) or _variable(job, number, "NODELIST", environ)
        found += [Node(name, str(group["type"]), number) for name in (expand(names) if names else [])]
    return found


def unusable(names: list[str]) -> dict[str, str]:
    """The nodes that Slurm wants back, or that are down. One that does not respond may still be at work."""
    words = {name: state.rstrip("*~#!%$@^-+") for name, state in states_of(f"--nodes={','.join(names)}").items()}
    return {name: f"is {word}" for name, word in words.items() if word.startswith(UNUSABLE)}


def answers(job: ElasticJob, node: Node) -> bool:
    """Whether Slurm can start a step on a node."""
    if states_of(f"--nodes={node.name}").get(node.name, "*").endswith("*"):
        return False
    return output_of([*srun(job, node), "true"], SECONDS_TO_PROBE) is not None


def spare(job: ElasticJob, environ: Mapping[str, str]) -> list[Node]:
    """Idle nodes that the job would get if it were requeued, because Slurm cannot add nodes to a job.

    None of a partition in which another job waits, which could get the nodes that this one gives up.
    """
    if not can_requeue(job, environ):
        return []
    present = [node.group for node in allocated(job, environ)]
    found: list[Node] = []
    for number, group in enumerate(job.groups):
        missing = int(group["nodes"]) - present.count(number)
        partition = _of_part(job, number, "%P", environ)
        if missing > 0 and partition and not _has_queue(partition):
            idle = [name for name in _idle(partition) if name not in {node.name for node in found}]
            found += [Node(name, str(group["type"]), number) for name in idle[:missing]]
    return found


def _has_queue(partition: str) -> bool:
    waiting = output_of(["squeue", "--noheader", "--states=PENDING", f"--partition={partition}", "--format=%i"])
    return bool(waiting and waiting.strip())


def _idle(partition: str) -> list[str]:
    states = states_of(f"--partition={partition}", "--states=idle")
    return sorted(name for name, state in states.items() if state == "idle")


def _of_part(job: ElasticJob, group: int, field: str, environ: Mapping[str, str]) -> str:
    """A field of squeue for the job, or for a part of a heterogeneous job; empty without an answer."""
    id_ = _variable(job, group, "ID", environ)
    answer = (output_of(["squeue", "--noheader", f"--jobs={id_}", f"--format={field}"]) or "").strip().splitlines()
    return answer[0].strip() if answer and answer[0] != "(null)" else ""


def _variable(job: ElasticJob, group: int, name: str, environ: Mapping[str, str]) -> str:
    suffix = f"_HET_GROUP_{group}" if len(job.groups) > 1 else ""
    return environ.get(f"SLURM_JOB_{name}{suffix}", "")


def can_requeue(job: ElasticJob, environ: Mapping[str, str]) -> bool:
    """Whether the script of the job would queue it again."""
    return int(environ.get("SLURM_RESTART_COUNT", "0")) < job.restarts


def srun(job: ElasticJob, node: Node) -> list[str]:
    """The command that starts a step on a node, without the program to start."""
    words = ["srun", "--nodes=1", "--ntasks=1", "--overlap", f"--nodelist={node.name}"]
    words += [f"--cpus-per-task={job.groups[node.group]['cpus']}"]
    return words + ([f"--het-group={node.group}"] if len(job.groups) > 1 else [])
