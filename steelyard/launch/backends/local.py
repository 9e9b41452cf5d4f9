"""Ranks on this machine: torchrun starts them, under a supervisor that outlives the terminal."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, ClassVar

from steelyard.core.errors import UserError
from steelyard.launch import job_spec, site_environment, supervisor
from steelyard.launch.backends import Backend, Option, Place, Record
from steelyard.launch.elastic_job import ElasticJob, Node
from steelyard.launch.job_spec import JobSpec, NodeGroup, agent_command, elastic_command
from steelyard.launch.launch_record import FOLDER, Launch

if TYPE_CHECKING:
    from steelyard.launch.submit import SubmitRequest
    from steelyard.planning.cluster import Cluster


class Local(Backend):
    """Ranks that a supervisor on this machine starts with one script."""

    takes = frozenset({Option.ELASTIC})
    is_remote = False
    stop_signal: ClassVar[int] = signal.SIGTERM

    def nodes(self, request: SubmitRequest, cluster: Cluster | None) -> list[NodeGroup]:
        """One node, with the smallest number of ranks that the plan allows; groups of ranks for an elastic run."""
        if request.min_nodes is not None:
            return job_spec.nodes_of(request, cluster)
        if request.nodes not in (None, 1):
            raise UserError(
                "--on local runs on one node", hint="use --on mpi or --on slurm for several, or give --min-nodes"
            )
        if request.recipe is None:
            return job_spec.of_this_machine(request, job_spec.nodes_of(request, cluster))
        world = request.ranks_per_node or request.recipe.parallel.least_world
        request.recipe.parallel.data_for(world)
        return [NodeGroup(1, world, gres=None if request.recipe.train.device == "cpu" else "gpu")]

    def scripts(self, spec: JobSpec) -> dict[str, str]:
        """One script, which ends with exec of the command that starts the ranks."""
        text = site_environment.preamble(spec.site, spec.workdir)
        return {"job.sh": f"{text}{self.preparation(spec)}{site_environment.executing(self.command(spec))}"}

    def preparation(self, spec: JobSpec) -> str:
        """The script line that unpacks the image, if necessary."""
        text = site_environment.preparation(spec.site.container, spec.reload_container)
        return f"bash -c {quote(text)} || exit 1\n" if text else ""

    def command(self, spec: JobSpec) -> list[str]:
        """torchrun; a command with one rank that does not train runs without torch."""
        if spec.min_nodes is not None:
            return elastic_command(spec)
        if not spec.is_training and job_spec.world(spec.groups) == 1:
            return agent_command(spec, "local", self.rank_variables, *spec.command_arguments)
        return torchrun_command(spec)

    def commands(self, spec: JobSpec) -> list[list[str]]:
        """bash with the script."""
        return [["bash", str(spec.run / FOLDER / "job.sh")]]

    def submit(self, spec: JobSpec, launch: Launch) -> Launch:
        """Start a supervisor, whose process id is the job id."""
        process = supervisor.start(spec.run, self.commands(spec)[0])
        return replace(launch, jobs=[str(process["pid"])], process=process)

    def poll(self, run: Path, launch: Launch, last: Mapping[str, Record]) -> list[Record]:
        """The state of the supervisor, or how it ended."""
        return [supervisor.poll(run, launch)]

    def cancel(self, run: Path, launch: Launch, at_once: bool) -> None:
        """Signal the supervisor, which forwards the signal. When it is killed, the kernel kills the ranks."""
        supervisor.cancel(run, launch, signal.SIGKILL if at_once else self.stop_signal)

    def place(self, environ: Mapping[str, str]) -> Place:
        """torchrun numbers the ranks."""
        return Place(rank=int(environ.get("RANK", "0")), local_rank=int(environ.get("LOCAL_RANK", "0")))

    def allocated(self, job: ElasticJob, environ: Mapping[str, str]) -> list[Node]:
        """Groups of ranks, named like their type: a10-0, a10-1."""
        types = [each["type"] for each in job.groups for _ in range(each["nodes"])]
        return [Node(f"{type_}-{types[:number].count(type_)}", type_) for number, type_ in enumerate(types)]

    def on_node(self, job: ElasticJob, node: Node, options: list[str]) -> list[str]:
        """The node agent as a process of this machine."""
        return [*job.agent, "--name", node.name, *options]

    def attempt_name(self, environ: Mapping[str, str]) -> str:
        """The process id of the supervisor."""
        return str(os.getpid())


def torchrun_command(spec: JobSpec) -> list[str]:
    """The process that runs torchrun, torchrun, and the node agents, inside the site's container."""
    [group] = spec.groups
    python, run = [spec.python, "-P", "-m"], ["--run", str(spec.run)]
    launcher = [*python, "steelyard.launch.torchrun", *run, "--ranks", str(group.ranks), "--"]
    agent = [*python, "steelyard.launch.node_agent", "--backend", "local", *run, "--one-rank", *spec.command_arguments]
    words = [*launcher, *python, *torchrun_options(group.ranks, spec.site.port), "--no-python", "--", *agent]
    return site_environment.wrapped(spec.site, words, spec.workdir, str(spec.run), spec.has_gpus)


def torchrun_options(ranks: int, port: int | None) -> list[str]:
    """torchrun as a module, with its options: this machine only, a free port unless one is set."""
    where = ["--standalone", "--local-addr=127.0.0.1"]
    if port is not None:
        where = ["--master-addr=127.0.0.1", f"--master-port={port}"]
    return ["torch.distributed.run", *where, f"--nproc-per-node={ranks}"]


BACKEND = Local()
