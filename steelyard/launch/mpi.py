"""A job for mpirun: which hosts, how many ranks on each, and how they are reached.

Ranks are mpirun's own: it starts each under a starter that keeps its log (`node.py --one-rank`). They meet at the first
host, on a free port of its unless one is set.
"""

from __future__ import annotations

from collections.abc import Sequence

from steelyard.core.errors import UserError
from steelyard.core.recipe.site_section import SiteSection
from steelyard.launch import containers
from steelyard.launch.job_spec import JobSpec
from steelyard.launch.node_groups import NodeGroup
from steelyard.launch.supervisor import HERE


def command(order: JobSpec) -> list[str]:
    """mpirun's whole line."""
    starter = [order.python, "-P", "-m", "steelyard.launch.node_agent", "--run", str(order.run), "--one-rank"]
    starter += ["--attempt", HERE, *order.command_arguments]
    gpus = any(group.gres for group in order.groups)
    return [*options(order.site, order.groups), *containers.wrapped(
        order.site, starter, order.workdir, str(order.run), gpus
    )]  # fmt: skip


def options(site: SiteSection, groups: Sequence[NodeGroup]) -> list[str]:
    """mpirun and its options, up to the command."""
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


def preparation(order: JobSpec) -> list[str] | None:
    """mpirun's line for what each host must do before: unpack an image."""
    text = containers.preparation(order.site.container, order.reload_container)
    if text is None:
        return None
    once = [NodeGroup(group.nodes, 1) for group in order.groups]
    return [*options(order.site, once), "bash", "-c", text]


def _only(groups: Sequence[NodeGroup]) -> NodeGroup:
    if len(groups) > 1:
        raise UserError(
            "mpirun starts the same number of ranks on every host, and the plan has several types of nodes",
            hint="submit it --on slurm, or plan for nodes that are alike",
        )
    return groups[0]


def refuse_hosts(site: SiteSection, groups: Sequence[NodeGroup]) -> None:
    """Say what is missing before anything starts."""
    hosts, needed = site.mpi.hosts, _only(groups).nodes
    if needed > max(len(hosts), 1):
        raise UserError(
            f"the plan needs {needed} hosts, and mpirun is told of {len(hosts)}",
            hint="name them: --hosts a1,a2 or mpi.hosts of the site",
        )
    for option in site.mpi.ssh_options:
        if any(character in option for character in '$`"\\\n'):  # mpirun hands them on to shells on the hosts.
            raise UserError(
                f"{option!r} would be read by a shell", hint="set it in ~/.ssh/config, or without such signs"
            )
    for host in hosts:
        if not host or any(character in host for character in ",: \n\t"):
            raise UserError(f"{host!r} is no name of a host", hint="hosts are names or addresses, without slots")
