"""The search space: nodes and their order, degrees, micro-batches, schedules and settings that the trainer can run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, permutations, product
from math import comb, gcd, prod
from typing import NamedTuple

from pydantic_core import PydanticCustomError

from steelyard.core.recipe import Recipe, validators
from steelyard.core.recipe.blocks import ExpertsBlock
from steelyard.core.recipe.parallel_section import ParallelSection
from steelyard.planning.cluster import Cluster, Placement

UNLIMITED = 100_000
MOST_USES = 512  # With more sets of nodes than this, only round numbers of nodes are tried.
LEAST_CONTEXT = 2048  # Minimum tokens per context rank; with fewer, communication dominates.


@dataclass(frozen=True)
class SearchLimits:
    """Limits of the search space."""

    tensor: int = 16
    micro_batch: int = 64
    virtual: int = 4
    contexts: tuple[int, ...] = (1, 2, 4, 8, 16)
    recomputes: tuple[str, ...] = ("none", "selective", "full")
    zeros: tuple[int, ...] = (0, 1, 2, 3)
    schedules: tuple[str, ...] = ("1f1b", "gpipe", "interleaved", "zero-bubble")
    sequences: tuple[bool, ...] = (True, False)
    """Settings of sequence parallelism to try with tensor parallelism."""
    zero_bubble: tuple[int, ...] = (1, 2)
    """Stages per rank under zero bubble."""
    even: bool = False
    """Whether all stages must have the same number of layers."""
    short: bool = False
    """Whether 1F1B may have fewer micro-batches than pipeline ranks."""
    subsets: bool = True
    """Whether nodes may stay idle."""
    arrangements: int = 64
    """Maximum number of orders of nodes along the pipeline; with more, nodes of one type are neighbours."""
    least_nodes: int = 1
    """Minimum number of nodes of a plan."""
    uses: int = UNLIMITED
    """Maximum number of node sets to evaluate, the most promising first."""
    meshes: int = UNLIMITED
    """Maximum number of meshes to finish, the most promising first."""


def limits_for(cluster: Cluster, objective: str = "time") -> SearchLimits:
    """The full space on clusters of up to 256 GPUs; on larger ones only the most promising meshes.

    Node sets of all sizes have nearly the same price bound, so a search by cost evaluates more meshes than one by time.
    A Pareto frontier takes two searches.
    """
    if cluster.ranks <= 256:
        return SearchLimits()
    meshes = {"time": 120, "pareto": 80}.get(objective, 150)
    return SearchLimits(micro_batch=8, virtual=2, arrangements=1, meshes=meshes)


class Use(NamedTuple):
    """The nodes that a plan uses, by type, without an order."""

    counts: tuple[tuple[str, int], ...]
    ranks: int


class Variant(NamedTuple):
    """The settings that a mesh leaves open."""

    recompute: str
    zero: int
    sequence_parallel: bool


def uses(cluster: Cluster, limits: SearchLimits) -> tuple[list[Use], bool]:
    """The node sets to try, and whether these are all possible sets.

    Any number of nodes of each type if that gives few sets; otherwise all, none and round numbers, fewer of these if
    there are many types.
    """
    whole = not limits.subsets or prod(nodes.count + 1 for nodes in cluster.nodes) <= MOST_USES
    factors = (1, 3) if prod(len(_round(nodes.count)) for nodes in cluster.nodes) <= MOST_USES else (1,)
    options = [
        [nodes.count] if not limits.subsets else _all(nodes.count) if whole else _round(nodes.count, factors)
        for nodes in cluster.nodes
    ]
    found = []
    for counts in product(*options):
        used = tuple((nodes.type, n) for nodes, n in zip(cluster.nodes, counts, strict=True) if n)
        if used and sum(counts) >= limits.least_nodes:
            ranks = sum(nodes.gpus * n for nodes, n in zip(cluster.nodes, counts, strict=True))
            found.append(Use(used, ranks))
    return found, whole


def _all(most: int) -> list[int]:
    return list(range(most, -1, -1))


def _round(most: int, factors: tuple[int, ...] = (1, 3)) -> list[int]:
    """All, none, and every 2^k and 3 x 2^k in between, which meshes divide well; or only every 2^k."""
    found = {most, 0} | {factor << power for factor in factors for power in range(most.bit_length())}
    return sorted((number for number in found if number <= most), reverse=True)


def orders(use: Use, limits: SearchLimits) -> list[Placement]:
    """Orders of different nodes along the pipeline: all of them if they are few, otherwise one block per type."""
    if not has_all_orders(use, limits):
        return [tuple(order) for order in permutations(use.counts)]
    return [_blocks(line) for line in _arrangements(use.counts)]


def has_all_orders(use: Use, limits: SearchLimits) -> bool:
    """Whether `orders` returns every order of the nodes."""
    placed = list(accumulate(count for _, count in use.counts))
    return prod(comb(n, count) for n, (_, count) in zip(placed, use.counts, strict=True)) <= limits.arrangements


def _arrangements(counts: tuple[tuple[str, int], ...]) -> Iterator[tuple[str, ...]]:
    if not counts:
        yield ()
        return
    for index, (type_, count) in enumerate(counts):
        left = counts[:index] + (((type_, count - 1),) if count > 1 else ()) + counts[index + 1 :]
        for rest in _arrangements(left):
            yield (type_, *rest)


def _blocks(line: tuple[str, ...]) -> Placement:
    blocks: list[tuple[str, int]] = []
    for type_ in line:
        if blocks and blocks[-1][0] == type_:
            blocks[-1] = (type_, blocks[-1][1] + 1)
        else:
            blocks.append((type_, 1))
    return tuple(blocks)


def tensors(recipe: Recipe, cluster: Cluster, use: Use, limits: SearchLimits) -> list[int]:
    """Tensor degrees that divide the dimensions of the model and the GPUs of every node."""
    model = recipe.model
    shared = [model.heads, *validators.mlp_widths(model), model.padded_vocab]
    shared += [cluster.nodes_of(type_).gpus for type_, _ in use.counts]
    shared.append(model.blocks.layers[0].attention.kv_heads)
    return [n for n in divisors(min(shared)) if n <= limits.tensor and all(size % n == 0 for size in shared)]


def contexts(recipe: Recipe, limits: SearchLimits) -> list[int]:
    """Context degrees that leave at least `LEAST_CONTEXT` tokens per rank."""
    length = recipe.data.sequence_length
    return [n for n in limits.contexts if n == 1 or (length % (2 * n) == 0 and length // n >= LEAST_CONTEXT)]


def agrees(recipe: Recipe, limits: SearchLimits, tensor: int, context: int, pipeline: int) -> bool:
    """Whether the recipe's validators allow this mesh: dropout, distillation and sparsity groups exclude some.

    And whether the sequence can be divided, if tensor ranks always divide it.
    """
    if tensor > 1 and False not in limits.sequences and recipe.data.sequence_length % (tensor * context):
        return False
    parallel = ParallelSection(tensor=tensor, context=context, pipeline=pipeline)
    try:
        validators.tensor(recipe.model, parallel, recipe.data.sequence_length)
        validators.experts(recipe.model, parallel)
        if recipe.sparsity is not None:
            validators.sparsity(recipe.model, recipe.sparsity, parallel, recipe.train)
    except PydanticCustomError:
        return False
    return True


def batches(recipe: Recipe) -> list[int]:
    """The global batches of a run, including those of its batch ramp."""
    train = recipe.train
    ramp = train.batch_ramp
    return [*(range(ramp.start, train.global_batch, ramp.increment) if ramp else ()), train.global_batch]


def batch_divisor(recipe: Recipe) -> int:
    """The number that micro-batch x data must divide, so that it divides every global batch of the run."""
    ramp = recipe.train.batch_ramp
    return gcd(recipe.train.global_batch, *((ramp.start, ramp.increment) if ramp else ()))


def micro_batches(recipe: Recipe, limits: SearchLimits) -> list[int]:
    """Micro-batches that divide the batch: powers of two, and the one in the recipe."""
    batch = batch_divisor(recipe)
    sizes = {2**power for power in range(limits.micro_batch.bit_length())} | {recipe.train.micro_batch}
    return sorted(n for n in sizes if n <= limits.micro_batch and batch % n == 0)


def meshes(ranks: int, batch: int, layers: int) -> Iterator[tuple[int, int]]:
    """Pipeline and data degrees for `ranks` tensor-context groups and `batch` micro-batches."""
    for pipeline in divisors(ranks):
        data = ranks // pipeline
        if batch % data == 0 and pipeline <= layers + 2:
            yield pipeline, data


def zeros(pipeline: int, columns: int, limits: SearchLimits) -> list[int]:
    """The ZeRO stages that differ for `columns` data and context ranks: a pipeline reduces gradients once per step."""
    if columns == 1:
        return [0]
    return [zero for zero in limits.zeros if pipeline == 1 or zero < 2] or list(limits.zeros[:1])


def experts(recipe: Recipe, columns: int) -> tuple[int, ...]:
    """Expert degrees that divide the experts of a layer and the `columns` data and context ranks; 1 without experts."""
    return divisors(gcd(*_expert_counts(recipe), columns)) if recipe.model.blocks.has_experts else (1,)


def all_experts(recipe: Recipe, ranks: int) -> list[int]:
    """Expert degrees on any mesh of up to `ranks` ranks."""
    if not recipe.model.blocks.has_experts:
        return [1]
    return [degree for degree in divisors(gcd(*_expert_counts(recipe))) if degree <= ranks]


def _expert_counts(recipe: Recipe) -> set[int]:
    return {layer.mlp.routing.experts for layer in recipe.model.blocks.layers if isinstance(layer.mlp, ExpertsBlock)}


def sequences(recipe: Recipe, tensor: int, context: int, limits: SearchLimits) -> list[bool]:
    """The settings of sequence parallelism to try; `True` needs tensor ranks that divide the sequence."""
    able = tensor > 1 and recipe.data.sequence_length % (tensor * context) == 0
    return [on for on in limits.sequences if able or not on] or [False]


def schedules(recipe: Recipe, pipeline: int, rounds: int, limits: SearchLimits) -> list[tuple[str, int]]:
    """Schedules that can run `rounds` micro-batches, with their stages per rank."""
    if pipeline == 1:
        return [("1f1b", 1)]
    found: list[tuple[str, int]] = []
    each = [batch * rounds // recipe.train.global_batch for batch in batches(recipe)]
    if limits.short or min(each) >= pipeline:
        found.append(("1f1b", 1))
    else:
        found.append(("gpipe", 1))
    if all(number % max(1, number // pipeline) == 0 for number in each):
        deep = [v for v in (1, 2, 4) if v <= limits.virtual and pipeline * v <= recipe.model.layers + 2]
        found += [("interleaved", v) for v in deep if v > 1]
        if not recipe.train.compile:
            found += [("zero-bubble", v) for v in deep if v in limits.zero_bubble]
    return [
        (name, virtual)
        for name, virtual in found
        if name in limits.schedules and not (limits.even and recipe.model.layers % (pipeline * virtual))
    ]


@lru_cache(maxsize=4096)
def divisors(number: int) -> tuple[int, ...]:
    """All divisors of a number, ascending."""
    return tuple(n for n in range(1, number + 1) if number % n == 0)
