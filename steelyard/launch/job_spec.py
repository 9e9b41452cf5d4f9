"""A job before a backend submits it: its command, and its nodes in rank order.

The nodes follow from the plan. `parallel.placement = ["a100:1", "a10:7"]` and the cluster file give two groups: one
node with the partition and gres of the a100s, then seven of the a10s, each with as many ranks as GPUs. A plan without a
placement has a number of ranks; the site, the cluster file or the command line give the ranks per node.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from steelyard.core import secrets
from steelyard.core.errors import UserError
from steelyard.core.recipe import Recipe
from steelyard.core.recipe.site_section import SiteSection
from steelyard.launch import site_environment
from steelyard.launch.launch_record import FOLDER
from steelyard.planning.cluster import Cluster, Nodes
from steelyard.sizes.gpu_catalogue import Gpu, by_name

if TYPE_CHECKING:
    from steelyard.launch.submit import SubmitRequest

COMMAND = "command.json"
NVIDIA = Path("/dev/nvidiactl")  # exists where an NVIDIA driver is loaded


@dataclass(frozen=True)
class NodeGroup:
    """Identical nodes that are consecutive in rank order."""

    nodes: int
    ranks: int  # per node
    partition: str | None = None
    gres: str | None = None
    gpu: Gpu | None = field(default=None, compare=False)  # the type, if known

    @property
    def gpus(self) -> int | None:
        """GPUs per node, if any are requested."""
        return self.ranks if self.gres else None


@dataclass(frozen=True)
class JobSpec:
    """A job that is checked but not yet started."""

    run: Path
    name: str
    site: SiteSection
    groups: list[NodeGroup]
    command: list[str]
    workdir: str
    python: str
    submitted: str
    mark: str = ""
    time_limit: str | None = None
    reload_container: bool = False
    allocation: str | None = None  # id of a running job whose nodes are used
    is_training: bool = False  # False for any other command
    min_nodes: int | None = None  # of an elastic run

    @property
    def has_gpus(self) -> bool:
        """Whether GPUs are requested on any node."""
        return any(group.gres for group in self.groups)

    @property
    def private_command(self) -> Path | None:
        """The file, readable only by its owner, for a command that contains a secret. Scripts and records omit it."""
        has_secret = secrets.redact(self.command) != self.command
        return self.run / FOLDER / COMMAND if has_secret else None

    @property
    def command_arguments(self) -> list[str]:
        """The last arguments of the node agent: the command, or the file that contains it."""
        private = self.private_command
        return ["--", *self.command] if private is None else ["--command-file", str(private)]


def agent_command(spec: JobSpec, backend: str, variables: Sequence[str], *options: str) -> list[str]:
    """The command of the node agent inside the site's container, which gets `variables` from the environment."""
    words = [spec.python, "-P", "-m", "steelyard.launch.node_agent", "--backend", backend, "--run", str(spec.run)]
    return site_environment.wrapped(
        spec.site, [*words, *options], spec.workdir, str(spec.run), spec.has_gpus, variables
    )


def elastic_command(spec: JobSpec) -> list[str]:
    """The process that supervises an elastic run. It runs outside the container, with the Python that submits."""
    return [sys.executable, "-P", "-m", "steelyard.launch.elastic", str(spec.run)]


def nodes_of(request: SubmitRequest, cluster: Cluster | None) -> list[NodeGroup]:
    """The nodes for a request: those of its plan, or the defaults for a command without one."""
    if request.recipe is None:
        return [of_command(request, cluster)]
    return of_plan(request.recipe, cluster, request.site, request.nodes, request.ranks_per_node)


def of_plan(
    recipe: Recipe, cluster: Cluster | None, site: SiteSection, nodes: int | None, per_node: int | None
) -> list[NodeGroup]:
    """The groups for a recipe's plan."""
    placement = recipe.parallel.placement
    if placement and cluster is not None:
        if nodes is not None or per_node is not None:
            raise UserError(
                "the plan's placement already sets the number of nodes and ranks",
                where=recipe.where("parallel.placement"),
                hint="remove --nodes and --ranks-per-node, or parallel.placement",
            )
        groups = _merged([_placed(recipe, cluster, entry) for entry in placement])
        if [group.nodes for group in groups] == [1] and recipe.parallel.data is not None:
            groups = [
                replace(groups[0], ranks=min(groups[0].ranks, recipe.parallel.least_world))
            ]  # Some GPUs stay idle.
    else:
        groups = [_alike(recipe, cluster, site, nodes, per_node)]
    recipe.parallel.data_for(world(groups))
    return [_without_gpus(group) for group in groups] if recipe.train.device == "cpu" and cluster is None else groups


def of_command(request: SubmitRequest, cluster: Cluster | None) -> NodeGroup:
    """The nodes for a command without a plan: by default one rank on one node, of the site's partition."""
    slurm, group = request.site.slurm, NodeGroup(request.nodes or 1, request.ranks_per_node or 1)
    types = cluster.nodes if cluster is not None else []
    fitting = [each for each in types if slurm.partition in (None, each.partition)]
    gres, partition = slurm.gres, slurm.partition
    if len(fitting) == 1 and request.uses_gpu:
        gres, partition = gres or fitting[0].gres or f"gpu:{group.ranks}", partition or fitting[0].partition
    return replace(group, partition=partition, gres=gres)


def of_this_machine(request: SubmitRequest, groups: list[NodeGroup]) -> list[NodeGroup]:
    """For hosts without a scheduler: a command that uses GPUs gets those of the hosts, if this one has any."""
    if request.recipe is None and request.uses_gpu and NVIDIA.exists():
        return [replace(group, gres=group.gres or "gpu") for group in groups]
    return groups


def world(groups: Sequence[NodeGroup]) -> int:
    """The total number of ranks."""
    return sum(group.nodes * group.ranks for group in groups)


def written(groups: Sequence[NodeGroup]) -> str:
    """The groups in the format that the node agent reads: `1x4,7x8`."""
    return ",".join(f"{group.nodes}x{group.ranks}" for group in groups)


def _placed(recipe: Recipe, cluster: Cluster, entry: str) -> NodeGroup:
    type_, _, count = entry.rpartition(":")
    if type_ not in cluster.by_type or not count.isdigit():
        raise UserError(
            f"{entry} does not name nodes of the cluster",
            where=recipe.where("parallel.placement"),
            hint=f"entries are TYPE:COUNT; the cluster file has {', '.join(cluster.by_type)}",
        )
    described = cluster.nodes_of(type_)
    if int(count) > described.count:
        raise UserError(
            f"{entry} requests {count} nodes, but the cluster has {described.count} of that type",
            where=recipe.where("parallel.placement"),
            hint="plan again with this cluster file",
        )
    return NodeGroup(int(count), described.gpus, described.partition, described.gres, cluster.gpu_of(described))


def _alike(
    recipe: Recipe, cluster: Cluster | None, site: SiteSection, nodes: int | None, per_node: int | None
) -> NodeGroup:
    """One group of identical nodes: those of the cluster's only type, or of the site."""
    described = _only_type(recipe, cluster)
    ranks = per_node or (described.gpus if described else None) or site.ranks_per_node
    needed = recipe.parallel.least_world
    if nodes is None:
        ranks = ranks or needed
        ranks = min(ranks, needed) if per_node is None else ranks
        if needed % ranks:
            raise UserError(
                f"the plan has {needed} ranks, which is not a multiple of {ranks} ranks per node",
                hint="give --nodes and --ranks-per-node, or plan for this cluster",
            )
        nodes = needed // ranks
    ranks = ranks or max(1, needed // nodes)
    partition = (described.partition if described else None) or site.slurm.partition
    gres = (described.gres if described else None) or site.slurm.gres or f"gpu:{ranks}"
    gpu = cluster.gpu_of(described) if cluster is not None and described is not None else _named_in(gres)
    return NodeGroup(nodes, ranks, partition, gres, gpu)


def _named_in(gres: str) -> Gpu | None:
    """The GPU that a gres such as `gpu:a10:4` names, if it is in the catalogue."""
    kind, _, rest = gres.partition(":")
    return by_name(rest.rpartition(":")[0]) if kind == "gpu" and ":" in rest else None


def _only_type(recipe: Recipe, cluster: Cluster | None) -> Nodes | None:
    if cluster is None:
        types = {entry.rpartition(":")[0] for entry in recipe.parallel.placement}
        if len(types) > 1:
            raise UserError(
                "the plan is for several types of nodes, but there is no cluster file that describes them",
                where=recipe.where("parallel.placement"),
                hint="give the cluster file that it was planned for: --cluster CLUSTER.toml",
            )
        return None
    if len(cluster.nodes) > 1:
        raise UserError(
            "the cluster has several types of nodes, and the plan does not say which one to use",
            where=recipe.where("parallel.placement"),
            hint="steelyard plan writes parallel.placement; or set it, such as " + f'["{cluster.nodes[0].type}:1"]',
        )
    return cluster.nodes[0]


def _merged(groups: list[NodeGroup]) -> list[NodeGroup]:
    """Merge consecutive identical groups."""
    merged: list[NodeGroup] = []
    for group in groups:
        if merged and replace(merged[-1], nodes=group.nodes) == group:
            merged[-1] = replace(group, nodes=merged[-1].nodes + group.nodes)
        else:
            merged.append(group)
    return merged


def _without_gpus(group: NodeGroup) -> NodeGroup:
    return replace(group, gres=None)
