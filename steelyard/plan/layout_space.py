"""What the search chooses from: meshes, micro-batches, schedules and orders of nodes that the engine can run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import permutations, product
from math import gcd, prod
from typing import NamedTuple

from pydantic_core import PydanticCustomError

from steelyard.core.recipe import Recipe, validators
from steelyard.core.recipe.model_section import LlamaConfig
from steelyard.core.recipe.parallel_section import ParallelSection
from steelyard.plan.cluster import Cluster
from steelyard.plan.layout import Placement
from steelyard.plan.software import MEGATRON, Software

MOST_ARRANGEMENTS = 64
MOST_USES = 512  # Sets of nodes up to which all of them are looked at.
LEAST_CONTEXT = 2048  # Tokens of a sequence that a context rank should keep; with fewer it only waits.


@dataclass(frozen=True)
class SearchLimits:
    """How far to look."""

    tensor: int = 16
    micro_batch: int = 64
    virtual: int = 4
    contexts: tuple[int, ...] = (1, 2, 4, 8, 16)
    recomputes: tuple[str, ...] = ("none", "selective", "full")
    zeros: tuple[int, ...] = (0, 1, 2, 3)
    schedules: tuple[str, ...] = ("1f1b", "gpipe", "interleaved", "zero-bubble")
    sequences: tuple[bool, ...] = (True, False)
    """Whether sequence parallelism may be on and off where there is tensor parallelism."""
    even: bool = False
    """Whether all stages must hold as many layers."""
    short: bool = False
    """Whether 1F1B may have fewer micro-batches than ranks."""
    subsets: bool = True
    """Whether nodes may be left idle."""
    uses: int = 100_000
    """Sets of nodes to look at, the most promising ones."""
    meshes: int = 100_000
    """Meshes to take to the end, the most promising ones."""


def limits_for(cluster: Cluster, objective: str = "time") -> SearchLimits:
    """All of it on clusters of up to 256 GPUs; beyond, only what promises the most.

    Sets of nodes of all sizes promise nearly the same price, so that more must be looked at for it than for time. A
    frontier takes two searches.
    """
    if cluster.ranks <= 256:
        return SearchLimits()
    return SearchLimits(micro_batch=8, virtual=2, meshes={"time": 300, "pareto": 120}.get(objective, 350))


def restricted(limits: SearchLimits, software: Software) -> SearchLimits:
    """What is left for a program that lacks some of it.

    Megatron-LM of 2021 to 2023 has 1F1B, plain (of any number of micro-batches) and interleaved, equal stages, and a
    distributed optimizer, which is zero 1. It has no context parallelism, no sharded gradients or weights, no gpipe and
    no zero bubble.
    """
    if software is not MEGATRON:
        return limits
    return replace(
        limits,
        contexts=(1,),
        zeros=tuple(zero for zero in limits.zeros if zero < 2),
        schedules=tuple(name for name in limits.schedules if name in ("1f1b", "interleaved")),
        even=True,
        short=True,
    )


class Use(NamedTuple):
    """Nodes that a plan uses, by type, in no order."""

    counts: tuple[tuple[str, int], ...]
    ranks: int


class Variant(NamedTuple):
    """What is left to choose once the mesh is."""

    recompute: str
    zero: int
    sequence_parallel: bool


def uses(cluster: Cluster, limits: SearchLimits) -> tuple[list[Use], bool]:
    """Sets of nodes to try, and whether these are all there are.

    Any number of each type may be used while that makes few sets; where it makes many, all, none and round numbers.
    """
    whole = not limits.subsets or prod(nodes.count + 1 for nodes in cluster.nodes) <= MOST_USES
    options = [
        [nodes.count] if not limits.subsets else _all(nodes.count) if whole else _round(nodes.count)
        for nodes in cluster.nodes
    ]
    found = []
    for counts in product(*options):
        used = tuple((nodes.type, n) for nodes, n in zip(cluster.nodes, counts, strict=True) if n)
        if used:
            ranks = sum(nodes.gpus * n for nodes, n in zip(cluster.nodes, counts, strict=True))
            found.append(Use(used, ranks))
    return found, whole


def _all(most: int) -> list[int]:
    return list(range(most, -1, -1))


def _round(most: int) -> list[int]:
    """All, every 2^k and 3 x 2^k below, and none: meshes divide these."""
    found = {most, 0} | {factor << power for factor in (1, 3) for power in range(most.bit_length())}
    return sorted((number for number in found if number <= most), reverse=True)


def orders(use: Use) -> list[Placement]:
    """Orders of unlike nodes along the pipeline: all of them while they are few, else types in blocks."""
    if len(use.counts) == 1:
        return [use.counts]
    total = 1
    placed = 0
    for _, count in use.counts:
        for number in range(1, count + 1):
            placed += 1
            total = total * placed // number
        if total > MOST_ARRANGEMENTS:
            return [tuple(order) for order in permutations(use.counts)]
    return [_blocks(line) for line in _arrangements(use.counts)]


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
    """Tensor degrees that divide the model and every node."""
    model = recipe.model
    shared = [model.heads, model.ffn, model.padded_vocab, *(cluster.nodes_of(type_).gpus for type_, _ in use.counts)]
    if isinstance(model, LlamaConfig):
        shared.append(model.kv_heads)
    return [n for n in divisors(min(shared)) if n <= limits.tensor and all(size % n == 0 for size in shared)]


def contexts(recipe: Recipe, limits: SearchLimits) -> list[int]:
    """Context degrees that cut the sequence into pieces worth their exchange."""
    length = recipe.data.sequence_length
    return [n for n in limits.contexts if n == 1 or (length % (2 * n) == 0 and length // n >= LEAST_CONTEXT)]


def agrees(recipe: Recipe, tensor: int, context: int, pipeline: int) -> bool:
    """Whether the recipe's own rules allow such a mesh: dropout, distilling and groups of weights forbid some."""
    parallel = ParallelSection(tensor=tensor, context=context, pipeline=pipeline)
    try:
        validators.tensor(recipe.model, parallel, recipe.data.sequence_length)
        if recipe.sparsity is not None:
            validators.sparsity(recipe.model, recipe.sparsity, parallel, recipe.train)
    except PydanticCustomError:
        return False
    return True


def batches(recipe: Recipe) -> list[int]:
    """The global batches of a run, as they grow."""
    train = recipe.train
    ramp = train.batch_ramp
    return [*(range(ramp.start, train.global_batch, ramp.increment) if ramp else ()), train.global_batch]


def dealt_batch(recipe: Recipe) -> int:
    """What micro-batch x data must divide, so that every batch of the run is dealt out whole."""
    ramp = recipe.train.batch_ramp
    return gcd(recipe.train.global_batch, *((ramp.start, ramp.increment) if ramp else ()))


def micro_batches(recipe: Recipe, limits: SearchLimits) -> list[int]:
    """Micro-batches that divide the batch: powers of two, and the recipe's own."""
    batch = dealt_batch(recipe)
    sizes = {2**power for power in range(limits.micro_batch.bit_length())} | {recipe.train.micro_batch}
    return sorted(n for n in sizes if n <= limits.micro_batch and batch % n == 0)


def meshes(ranks: int, batch: int, layers: int) -> Iterator[tuple[int, int]]:
    """Pipeline and data degrees: `ranks` groups of ranks, `batch` micro-batches to deal out among data ranks."""
    for pipeline in divisors(ranks):
        data = ranks // pipeline
        if batch % data == 0 and pipeline <= layers + 2:
            yield pipeline, data


def zeros(pipeline: int, columns: int, limits: SearchLimits) -> list[int]:
    """Degrees of sharding that differ: `columns` ranks share weights, and a pipeline sums gradients once per step."""
    if columns == 1:
        return [0]
    return [zero for zero in limits.zeros if pipeline == 1 or zero < 2]


def sequences(recipe: Recipe, tensor: int, context: int, limits: SearchLimits) -> list[bool]:
    """Whether sequence parallelism may be on and off: on where it has something to cut and its pieces are equal."""
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
            found += [("zero-bubble", v) for v in deep if v <= 2]
    return [
        (name, virtual)
        for name, virtual in found
        if name in limits.schedules and not (limits.even and recipe.model.layers % (pipeline * virtual))
    ]


@lru_cache(maxsize=4096)
def divisors(number: int) -> tuple[int, ...]:
    """All of them, ascending."""
    return tuple(n for n in range(1, number + 1) if number % n == 0)
