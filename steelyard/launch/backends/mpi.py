"""Ranks on several hosts: mpirun starts them, under a supervisor on this machine.

mpirun starts each rank under a node agent that captures its log (`node_agent.py --one-rank`). The rendezvous is on the
first host, on a free port unless one is set.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from shlex import join
from typing import TYPE_CHECKING

from steelyard.core.errors import UserError
from steelyard.core.recipe.site_section import SiteSection
from steelyard.launch import job_spec, site_environment
from steelyard.launch.backends import Option, Place
from steelyard.launch.backends.local import Local
from steelyard.launch.job_spec import JobSpec, NodeGroup, agent_command
from steelyard.launch.supervisor import HERE

if TYPE_CHECKING:
    from steelyard.launch.submit import SubmitRequest
    from steelyard.planning.cluster import Cluster


class Mpi(Local):
    """Ranks that mpirun starts under a supervisor."""

    takes = frozenset({Option.HOSTS})
    is_remote = True
    stop_signal = signal.SIGUSR1  # mpirun kills its ranks one second after SIGTERM, but forwards SIGUSR1.
    rank_variables = (
        "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE",
        "PMIX_NAMESPACE",
    )  # fmt: skip

    def nodes(self, request: SubmitRequest, cluster: Cluster | None) -> list[NodeGroup]:
        """The nodes of the plan. Raises an error if there are too few hosts."""
        found = job_spec.of_this_machine(request, job_spec.nodes_of(request, cluster))
        refuse_hosts(request.site, found)
        return found

    def preparation(self, spec: JobSpec) -> str:
        """The preparation, once on each host."""
        text = site_environment.preparation(spec.site.container, spec.reload_container)
        if text is None:
            return ""
        once = [NodeGroup(group.nodes, 1) for group in spec.groups]
        return f"{join([*options(spec.site, once), 'bash', '-c', text])} || exit 1\n"

    def command(self, spec: JobSpec) -> list[str]:
        """The complete mpirun command."""
        words = ["--one-rank", "--attempt", HERE, *spec.command_arguments]
        return [*options(spec.site, spec.groups), *agent_command(spec, "mpi", self.rank_variables, *words)]

    def place(self, environ: Mapping[str, str]) -> Place:
        """Open MPI numbers the ranks of the job and of each host; other versions give only the rank."""
        ranks = [environ[name] for name in ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK") if name in environ]
        local = [environ[name] for name in ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK") if name in environ]
        return Place(rank=int([*ranks, "0"][0]), local_rank=int([*local, "0"][0]))


def options(site: SiteSection, groups: Sequence[NodeGroup]) -> list[str]:
    """mpirun and its options, without the command."""
    mpi, group = site.mpi, _only(groups)
    hosts = mpi.hosts[: group.nodes]
    words = [mpi.mpirun]
    if hosts:
        words += ["-x", f"MASTER_ADDR={hosts[0]}"]
    words += ["-x", f"MASTER_PORT={site.port}"] if site.port else []
    for name in [*site.environment, *site.prepend]:
        words += ["-x", name]
    if hosts:
        words += ["--host", ",".join(f"{host}:{mpi.slots or group.ranks}" for host in hosts)]
    words += ["--map-by", f"ppr:{group.ranks}:node"]
    words += ["--cpus-per-rank", str(mpi.cpus_per_rank)] if mpi.cpus_per_rank else []
    ssh = [*mpi.ssh_options, *([f"-p {mpi.ssh_port}"] if mpi.ssh_port else [])]
    words += ["--mca", "plm_rsh_args", " ".join(ssh)] if ssh else []
    return [*words, *mpi.options]


def _only(groups: Sequence[NodeGroup]) -> NodeGroup:
    if len(groups) > 1:
        raise UserError(
            "mpirun starts the same number of ranks on every host, but the plan has several types of nodes",
            hint="use --on slurm, or plan for nodes of one type",
        )
    return groups[0]


def refuse_hosts(site: SiteSection, groups: Sequence[NodeGroup]) -> None:
    """Raise an error if hosts are missing or host names or ssh options are invalid."""
    hosts, needed = site.mpi.hosts, _only(groups).nodes
    if needed > max(len(hosts), 1):
        raise UserError(
            f"the plan needs {needed} hosts, but only {len(hosts)} are given for mpirun",
            hint="list them: --hosts a1,a2 or mpi.hosts of the site",
        )
    for option in site.mpi.ssh_options:
        if any(character in option for character in '$`"\\\n'):  # mpirun passes them to shells on the hosts.
            raise UserError(
                f"{option!r} would be interpreted by a shell", hint='set it in ~/.ssh/config, or without $ ` " \\'
            )
    for host in hosts:
        if not host or any(character in host for character in ",: \n\t"):
            raise UserError(f"{host!r} is not a host name", hint="hosts are names or addresses, without slots")


BACKEND = Mpi()
