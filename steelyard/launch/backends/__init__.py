"""Launch backends: the programs that start the ranks of a job, behind one protocol.

A backend is one module of this folder. Its name is the value of `--on`, and its `BACKEND` implements `Backend`. A
module with an underscore in its name belongs to a backend and is not one itself. Code outside this folder does not test
for the name of a backend and uses no terms of a scheduler: job states are `JobState`, and a job id is a string that
only its backend interprets.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from steelyard.core.errors import UserError

if TYPE_CHECKING:
    from steelyard.core.recipe.site_section import SiteSection
    from steelyard.launch.elastic_job import ElasticJob, Node
    from steelyard.launch.job_spec import JobSpec, NodeGroup
    from steelyard.launch.launch_record import Launch
    from steelyard.launch.submit import SubmitRequest
    from steelyard.planning.cluster import Cluster

Record = dict[str, Any]  # a line of scheduler.jsonl, see launch_record.py
FIRST_WORDS = "slurm"  # Records older than JobState have this backend's state names, whichever backend wrote them.


class JobState(StrEnum):
    """The state of a job, the same for every backend."""

    QUEUED = "queued"
    HELD = "held"  # queued, but does not start until something is changed
    REQUEUED = "requeued"
    SUSPENDED = "suspended"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"
    TIMED_OUT = "timed_out"
    OUT_OF_MEMORY = "out_of_memory"
    NODE_FAILED = "node_failed"
    PREEMPTED = "preempted"
    UNKNOWN = "unknown"


WAITING = frozenset({JobState.QUEUED, JobState.HELD, JobState.REQUEUED, JobState.SUSPENDED})
LIVE = WAITING | {JobState.RUNNING, JobState.UNKNOWN}
ENDED = frozenset(JobState) - LIVE


class Option(StrEnum):
    """Options of `submit` that only some backends support; the value completes "this backend ..."."""

    HOSTS = "takes no hosts"
    TIME = "has no time limits"
    ALLOCATION = "has no allocations"
    ARRAY = "has no job arrays"
    ELASTIC = "does not continue on the nodes that remain"


@dataclass(frozen=True)
class Place:
    """The position in its job of a process that a backend started."""

    node: int = 0  # index among the nodes of its job; the node agent derives the ranks from it
    rank: int = 0  # if the backend starts each rank separately
    local_rank: int = 0
    address: str | None = None  # at which the other nodes reach this one; None: the host name


class Backend(Protocol):
    """Starts, polls and cancels jobs."""

    takes: ClassVar[frozenset[Option]] = frozenset()
    is_remote: ClassVar[bool] = True
    """Whether ranks run on other machines than the one that submits."""
    program: ClassVar[str | None] = None
    """The program that must be installed on the machine that submits."""
    rank_variables: ClassVar[tuple[str, ...]] = ()
    """The variables that `place` reads: a container must pass them on."""

    def nodes(self, request: SubmitRequest, cluster: Cluster | None) -> list[NodeGroup]:
        """The nodes that a request needs. Raises an error if the backend cannot run the request."""

    def scripts(self, spec: JobSpec) -> dict[str, str]:
        """The scripts of a job by file name, written to `launch/` of the run folder."""

    def commands(self, spec: JobSpec) -> list[list[str]]:
        """The commands that `submit` runs."""

    def submit(self, spec: JobSpec, launch: Launch) -> Launch:
        """Start or queue a job whose scripts are written. Returns the launch with its job ids."""

    def poll(self, run: Path, launch: Launch, last: Mapping[str, Record]) -> list[Record]:
        """The state of each job of a launch. `last` has the last record of each job."""

    def cancel(self, run: Path, launch: Launch, at_once: bool) -> None:
        """End the jobs of a launch: ranks save and stop, or are killed with `at_once`."""

    def place(self, environ: Mapping[str, str]) -> Place:
        """Which node or rank this process is, and the address at which others reach it."""

    def logs(self, run: Path) -> list[Path]:
        """The log files of a run."""
        return sorted((run / "logs").glob("*.*"))

    def trial_site(self, site: SiteSection, minutes: int) -> SiteSection:
        """The site for a trial of `tune`: no requeue, and a time limit of `minutes` unless the site sets one."""
        return site

    def owns(self, job: str, named: str) -> bool:
        """Whether `named` is the id of this job or of a part of it."""
        return job == named

    def find(self, run: Path, marks: list[str]) -> list[str | None]:
        """The ids of jobs that were submitted with these marks and whose ids were not recorded."""
        return [None for _ in marks]

    def translate(self, record: Record) -> Record:
        """Translate a record with the backend's own state names to a neutral one."""
        return record | {"state": JobState.UNKNOWN}

    def allocated(self, job: ElasticJob, environ: Mapping[str, str]) -> list[Node]:
        """The nodes that an elastic job has now; for backends with `Option.ELASTIC`, like the next ones."""
        raise UserError(f"this backend {Option.ELASTIC}")

    def unusable(self, names: list[str]) -> dict[str, str]:
        """The nodes of a job that the scheduler does not want to be used, and why, such as `is drained`."""
        return {}

    def answers(self, job: ElasticJob, node: Node) -> bool:
        """Whether a node that was lost can start processes again."""
        return True

    def on_node(self, job: ElasticJob, node: Node, options: list[str]) -> list[str]:
        """The command that starts a node agent on a node."""
        raise UserError(f"this backend {Option.ELASTIC}")

    def supervised_on(self, environ: Mapping[str, str]) -> str | None:
        """The node that runs the supervisor, which only a new start of the job can leave."""
        return None

    def can_requeue(self, job: ElasticJob, environ: Mapping[str, str]) -> bool:
        """Whether the job is queued again after it has saved."""
        return False

    def spare(self, job: ElasticJob, environ: Mapping[str, str]) -> list[Node]:
        """The nodes that the job would get in addition if it were queued again now."""
        return []

    def lost_supervisor(self, environ: Mapping[str, str]) -> None:
        """Called on a node of an elastic job whose supervisor is gone."""
        return None

    def attempt_name(self, environ: Mapping[str, str]) -> str:
        """A name for the attempts of this job that no earlier job of the run had."""
        return "0"

    def array(self, specs: list[JobSpec]) -> tuple[list[str], dict[str, str]]:
        """The command that submits jobs as one array, and all scripts by path; for backends with `Option.ARRAY`."""
        raise UserError(f"this backend {Option.ARRAY}")

    def submit_array(self, specs: list[JobSpec], launches: list[Launch]) -> list[Launch]:
        """Submit jobs as one array; for backends with `Option.ARRAY`."""
        raise UserError(f"this backend {Option.ARRAY}")


def names() -> list[str]:
    """The names of all backends."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if "_" not in module.name)


def load(name: str) -> Backend:
    """The backend of this name."""
    module = f"{__name__}.{name}"
    if module not in sys.modules and name not in names():
        raise UserError(f"there is no backend {name}", hint=f"backends: {', '.join(names())}")
    backend: Backend = importlib.import_module(module).BACKEND
    return backend


def owns(name: object, job: str, named: str) -> bool:
    """Whether `named` is a job of a backend or a part of it. An unknown backend has no parts."""
    try:
        return load(str(name)).owns(job, named)
    except UserError:
        return job == named


def refuse_option(name: str, option: Option, otherwise: str = "") -> None:
    """Raise an error if a backend does not support an option, and name the backends that do."""
    if option not in load(name).takes:
        taking = " or ".join(f"--on {each}" for each in names() if option in load(each).takes)
        raise UserError(f"--on {name} {option}", hint=f"use {taking}{otherwise}")


def neutral(record: Record) -> Record:
    """The record with a `JobState`: states of other schedulers are translated."""
    state = record.get("state")
    is_neutral = isinstance(state, str) and state in frozenset(JobState)
    if not state or is_neutral:
        return record
    return load(FIRST_WORDS).translate(record)
