"""The job of an elastic run, `launch/elastic.json`, and its attempts, `attempts.jsonl` in the run folder.

`elastic.json` is written by `submit --min-nodes` and read by the process that supervises the run (`elastic.py`):

    backend, min_nodes   the value of `--on`, and the fewest nodes to train with
    groups               nodes in rank order: {"type": "a10", "nodes": 2, "ranks": 1, "cpus": 4}
    cluster              the cluster file, with as many GPUs per node as the job has ranks there
    step                 options of the job step of each node
    seconds_to_start     what a node may take until its agent runs, the pull of an image included
    agent, command       the words of the node agent before its options, and its last options

`attempts.jsonl` has one object for each submission, for each attempt, and for each reason to wait:

    {"submitted": "slurm", "time": ISO}
    {"attempt": 2, "time": ISO, "why": "b2 does not answer since 12:03:07", "detected": 1700000000.0,
     "nodes": ["a1", "b1"], "unused": {"b2": "does not answer since 12:03:07"}, "ranks": 2,
     "layout": {"tensor": 1, ..., "micro_batch": 2}}
    {"waiting": "needs 2 nodes, 1 is alive (b2 does not answer since 12:03:07)", "time": ISO}

`detected` is when the loss was noticed, `time` when the attempt started.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steelyard.core import files
from steelyard.core.errors import RuntimeFailure, UserError
from steelyard.core.recipe import Recipe, to_toml
from steelyard.core.run import now
from steelyard.core.safe_parse import json_objects, loads
from steelyard.launch import backends, job_spec, site_environment
from steelyard.launch.backends import Option
from steelyard.launch.job_spec import JobSpec
from steelyard.launch.launch_record import FOLDER
from steelyard.planning import cluster as clusters
from steelyard.planning import site_calibration
from steelyard.planning.cluster import Cluster, Nodes
from steelyard.planning.site_calibration import CalibratedRun

if TYPE_CHECKING:
    from steelyard.launch.submit import SubmitRequest

JOB, ATTEMPTS, SUBMITTED = "elastic.json", "attempts.jsonl", "submitted.toml"
SECONDS_TO_START, SECONDS_TO_START_A_CONTAINER = 90.0, 900.0
ONLY_TYPE = "node"  # the type of all nodes of a job without a cluster file


@dataclass(frozen=True)
class Node:
    """A node of the job: its name, its type in the cluster file, and the group of the job that it belongs to."""

    name: str
    type: str
    group: int = 0


@dataclass(frozen=True)
class ElasticJob:
    """The contents of `elastic.json`."""

    backend: str
    min_nodes: int
    groups: list[dict[str, Any]]
    cluster: dict[str, Any]
    agent: list[str]
    command: list[str]
    step: list[str] = field(default_factory=list)
    restarts: int = 0
    """How often the job may be queued again."""
    seconds_to_start: float = SECONDS_TO_START
    calibration: list[dict[str, Any]] = field(default_factory=list)
    """The site's calibration at submission: runs of `planning/site_calibration.py`."""

    @property
    def machines(self) -> Cluster:
        """The cluster with all nodes of the job, and the calibration of its site."""
        runs = [CalibratedRun.model_validate(run) for run in self.calibration]
        return site_calibration.calibrated(Cluster.model_validate(self.cluster), runs)

    def ranks_of(self, type_: str) -> int:
        """Ranks on each node of a type."""
        return next(int(group["ranks"]) for group in self.groups if group["type"] == type_)


def refuse_inelastic(request: SubmitRequest) -> None:
    """Raise an error for a request that cannot be elastic."""
    backends.refuse_option(request.on, Option.ELASTIC, ", or remove --min-nodes")
    if request.recipe is None or request.job is not None:
        raise UserError("--min-nodes needs a recipe and excludes --job", hint="remove --min-nodes")


def prepare(request: SubmitRequest, spec: JobSpec) -> None:
    """Write the files of the process that supervises an elastic run. Attempts of an earlier submission are over."""
    job = of_request(request, spec)
    if job is not None or attempts(spec.run):
        append(spec.run, {"submitted": request.on})
    if job is not None and request.recipe is not None:
        files.write_json(spec.run / FOLDER / JOB, asdict(job))
        files.write_text(spec.run / FOLDER / SUBMITTED, to_toml(request.recipe.settings()))


def of_request(request: SubmitRequest, spec: JobSpec) -> ElasticJob | None:
    """The elastic job of a request; None without `--min-nodes`."""
    if spec.min_nodes is None or request.recipe is None:
        return None
    port = ["--port", str(spec.site.port)] if spec.site.port else []
    agent = job_spec.agent_command(spec, request.on, backends.load(request.on).rank_variables, *port)
    cluster = clusters.load(request.cluster) if request.cluster else None
    job = of(spec, request.on, agent, cluster, request.recipe)
    runs = site_calibration.chosen(request.cluster)[0] if request.cluster else []
    return replace(job, calibration=[run.model_dump() for run in runs])


def of(spec: JobSpec, backend: str, agent: list[str], cluster: Cluster | None, recipe: Recipe) -> ElasticJob:
    """The elastic job of a spec. Each group of the spec must be nodes of one type."""
    assert spec.min_nodes is not None
    _refuse_unplannable(spec, cluster, recipe)
    total = sum(group.nodes for group in spec.groups)
    if not 1 <= spec.min_nodes <= total:
        raise UserError(f"--min-nodes is {spec.min_nodes}, but the job has {total} nodes", hint="give a smaller number")
    placed = [entry.rpartition(":") for entry in recipe.parallel.placement] if cluster is not None else []
    types = [type_ for type_, _, count in placed for _ in range(int(count))]
    types = types or [cluster.nodes[0].type if cluster is not None else ONLY_TYPE] * total
    groups: list[dict[str, Any]] = []
    by_type: dict[str, Nodes] = {}
    first = 0
    for group in spec.groups:
        here = set(types[first : first + group.nodes])
        first += group.nodes
        if len(here) != 1:
            raise UserError(
                f"nodes of the types {', '.join(sorted(here))} have the same partition and gres",
                hint="give them different ones in the cluster file, so that --min-nodes knows which node is of which",
            )
        type_ = here.pop()
        cpus = group.ranks * (spec.site.slurm.cpus_per_rank or (4 if group.gres else 1))
        groups.append({"type": type_, "nodes": group.nodes, "ranks": group.ranks, "cpus": cpus})
        made = cluster.nodes_of(type_) if cluster is not None else None
        gpu = group.gpu.name if group.gpu is not None and recipe.train.device != "cpu" else "cpu"
        made = made or Nodes(type=type_, count=1, gpu=gpu, gpus=group.ranks)
        count = group.nodes + (by_type[type_].count if type_ in by_type else 0)
        by_type[type_] = made.model_copy(update={"count": count, "gpus": group.ranks})
    every = list(by_type.values())
    machines = cluster.with_nodes(every) if cluster is not None else Cluster(nodes=every, links=[], gpus=[])
    return ElasticJob(
        backend, spec.min_nodes, groups, machines.model_dump(mode="json"), agent, spec.command_arguments,
        site_environment.pyxis_options(spec.site, spec.workdir, str(spec.run)),
        spec.site.slurm.max_restarts if spec.site.slurm.requeue else 0,
        SECONDS_TO_START if spec.site.container.kind == "none" else SECONDS_TO_START_A_CONTAINER,
    )  # fmt: skip


def _refuse_unplannable(spec: JobSpec, cluster: Cluster | None, recipe: Recipe) -> None:
    """Raise errors now that a search would raise after the first loss."""
    if recipe.parallel.replicate > 1:
        raise UserError(
            "--min-nodes cannot replan hybrid sharding",
            where=recipe.where("parallel.replicate"),
            hint="remove parallel.replicate, or --min-nodes",
        )
    if cluster is None and recipe.train.device != "cpu" and any(group.gpu is None for group in spec.groups):
        raise UserError(
            "--min-nodes plans for the nodes that remain, but the GPU type is not known",
            hint="give a cluster file: --cluster CLUSTER.toml",
        )


def read(run: Path) -> ElasticJob:
    """Read `elastic.json`."""
    try:
        return ElasticJob(**loads((run / FOLDER / JOB).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise RuntimeFailure(f"{run / FOLDER / JOB} cannot be read: {error}") from None


def attempts(run: Path) -> list[dict[str, Any]]:
    """All attempts so far and the reasons to wait, without incomplete lines."""
    try:
        lines = (run / ATTEMPTS).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    return list(json_objects(lines))


def append(run: Path, record: dict[str, Any]) -> None:
    """Add a record with the current time to `attempts.jsonl`."""
    with open(run / ATTEMPTS, "a", encoding="utf-8") as file:
        file.write(json.dumps(record | {"time": now()}) + "\n")


def described(reasons: dict[str, str], names: Sequence[str]) -> str:
    """Such as: b2 does not answer since 12:03:07, b3 is drained."""
    return ", ".join(f"{name} {reasons[name]}" for name in names if name in reasons)
