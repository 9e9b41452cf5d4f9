"""Plans the next attempt of an elastic run for the nodes that can be used.

All nodes of the job: the layout of the submitted recipe. Fewer: the planner searches layout, partition and micro-batch
for them. Only `[parallel]` and `train.micro_batch` differ from the submitted recipe, so global batch, samples, learning
rate and seed of a step do not depend on the nodes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from steelyard.core.errors import RuntimeFailure, SteelyardError
from steelyard.core.recipe import Recipe
from steelyard.core.recipe.toml import leaves
from steelyard.launch.elastic_job import ElasticJob, Node
from steelyard.planning import layout_space, plan_report
from steelyard.planning.search import search

MAY_CHANGE = ("parallel.", "train.micro_batch")
MOST_MESHES = 60  # A search for a large cluster must not take longer than the start of the ranks.


@dataclass(frozen=True)
class AttemptPlan:
    """Nodes in rank order, ranks on each, and the recipe with its layout."""

    nodes: list[Node]
    ranks: list[int]
    recipe: Recipe

    @property
    def groups(self) -> str:
        """The ranks of all nodes in the format of the node agent."""
        return ",".join(f"1x{count}" for count in self.ranks)

    def layout(self) -> dict[str, Any]:
        """`[parallel]` and `train.micro_batch`, for the record of the attempt."""
        parallel = self.recipe.settings().get("parallel", {})
        return {**parallel, "micro_batch": self.recipe.train.micro_batch}


def plan(job: ElasticJob, recipe: Recipe, usable: Sequence[Node]) -> AttemptPlan | str:
    """The plan for the usable nodes, or why there is none."""
    if len(usable) < job.min_nodes:
        return f"needs {job.min_nodes} nodes, {len(usable)} {'is' if len(usable) == 1 else 'are'} alive"
    counts = Counter(node.type for node in usable)
    wanted = Counter({each["type"]: 0 for each in job.groups})
    for each in job.groups:
        wanted[each["type"]] += each["nodes"]
    if counts == wanted:
        order = [each["type"] for each in job.groups for _ in range(each["nodes"])]
        return AttemptPlan(_named(order, usable), [job.ranks_of(type_) for type_ in order], recipe)
    machines = job.machines
    machines = machines.with_nodes(
        [nodes.model_copy(update={"count": counts[nodes.type]}) for nodes in machines.nodes if counts[nodes.type]]
    )
    limits = layout_space.limits_for(machines)
    limits = replace(limits, least_nodes=job.min_nodes, meshes=min(limits.meshes, MOST_MESHES))
    try:
        found = search(recipe, machines, top=1, limits=limits)
    except SteelyardError as error:
        return str(error)
    if not found.plans:
        here = ", ".join(f"{count} {type_}" for type_, count in counts.items())
        near = f": {plan_report.shown(found.nearest[1])}, {found.nearest[2]}" if found.nearest is not None else ""
        return f"no layout fits {here}{near}"
    layout = found.plans[0].layout
    planned = layout.written(recipe)
    _refuse_other_changes(recipe, planned)
    order = [type_ for type_, count in layout.placement for _ in range(count)]
    return AttemptPlan(_named(order, usable), [job.ranks_of(type_) for type_ in order], planned)


def _named(types: Sequence[str], usable: Sequence[Node]) -> list[Node]:
    """A usable node for each type in a list."""
    left = list(usable)
    chosen = []
    for type_ in types:
        chosen.append(next(node for node in left if node.type == type_))
        left.remove(chosen[-1])
    return chosen


def _refuse_other_changes(submitted: Recipe, planned: Recipe) -> None:
    before, after = dict(leaves(submitted.settings())), dict(leaves(planned.settings()))
    changed = [key for key in before.keys() | after.keys() if before.get(key) != after.get(key)]
    other = sorted(key for key in changed if not key.startswith(MAY_CHANGE))
    if other:
        raise RuntimeFailure(f"the planner changed {', '.join(other)}, which would change the training")
