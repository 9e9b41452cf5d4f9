"""Whether a layout fits in memory: what the training program allocates per pipeline rank against what the GPU has.

Steelyard's own memory is `sizes.memory`. The two other programs allocate differently:

Megatron-LM of 2021 to 2023 and Megatron-DeepSpeed's pipeline engine take 20 bytes per parameter in fp16: weight and
gradient (2 + 2), their fp32 copies (4 + 4) and Adam's moments (8). In bf16 gradients are only summed in fp32, which
makes 18; fp32 needs no copies, which makes 16. The distributed optimizer (ZeRO 1) shards copies and moments over the
data-parallel ranks. A layer keeps s b h (10 + 24 / t) + 5 a s^2 b / t bytes per micro-batch in flight (Korthikanti
2022, section 4), and without dropout s b h (8 + 24 / t) + 2 a s^2 b / t. In fp32 everything except the dropout masks
takes twice as much. `_MegatronLayer` has the temporaries.

TorchTitan uses FSDP2 over the data and context ranks and computes the loss on full fp32 logits. The peak is the largest
of three moments:

- the loss: weights and Adam's moments (4 + 8 bytes per parameter of a shard), saved activations, the gathered embedding
  and head, and the logits;
- the first layers of a backward pass: the recomputed layer, gathered layers and the gradients of a layer take the place
  of the logits;
- the optimizer step: weights, gradients, moments, and one more fp32 value per parameter, because it runs per tensor.

In a pipeline, FSDP keeps gathered weights for all micro-batches (2 bytes per parameter) and sums gradients before it
shards them (4). The published figures are what PyTorch's allocator reserved, including fragmentation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from steelyard.core import units
from steelyard.core.recipe import Recipe
from steelyard.core.recipe.parallel_section import Partition
from steelyard.planning.cluster import Cluster
from steelyard.planning.layout import Layout, Seat
from steelyard.planning.predict import Predictor
from steelyard.planning.software import TORCHTITAN, Software
from steelyard.sizes import activations
from steelyard.sizes.activations import FP32, working_bytes
from steelyard.sizes.gpu_catalogue import GIB
from steelyard.sizes.in_flight import fullest
from steelyard.sizes.memory import RESERVED, Memory
from steelyard.sizes.stage_layers import stage_parameters

# Megatron's bytes per parameter: weights, gradients, and what the distributed optimizer shards.
MEGATRON_BYTES = {"fp16": (2, 2, 16), "bf16": (2, 4, 12), "fp32": (4, 4, 8), "fp8": (2, 4, 12)}
BUCKET = 500_000_000  # values that DeepSpeed's pipeline engine copies into one bucket and reduces at once
WORKING = 2  # bytes of a weight that FSDP gathers
# TorchTitan's bytes per logit: in 16 bits, in fp32, its softmax and, in the backward pass, two gradients, of which one
# reuses the memory of the fp32 logits. The 16-bit block is too small to be reused.
LOGIT_BYTES = WORKING + 3 * FP32
# Of a process, beside PyTorch's memory: the context, loaded kernels, and NCCL's buffers, which are larger with NVLink's
# many channels (fitted).
OUTSIDE_GIB = {"nvlink": 4.65, "pcie": 2.65, "rdma": 2.65, "tcp": 2.65}
FRAGMENTATION = 0.08  # share of the tensors' memory that the allocator reserves in addition (fitted)


@dataclass(frozen=True)
class Room:
    """The memory that a pipeline rank needs, and the memory that its GPUs have for tensors."""

    rank: int
    memory: Memory
    usable: int
    gpu: str
    host: int = 0
    """Bytes of host memory on a node, if all its ranks need as much as this one."""
    host_usable: int | None = None

    @property
    def fits(self) -> bool:
        """Whether GPU memory and host memory are sufficient."""
        return self.memory.total <= self.usable and (self.host_usable is None or self.host <= self.host_usable)


def rooms(predictor: Predictor, layout: Layout, ranks: Sequence[int] | None = None) -> list[Room]:
    """One `Room` for each pipeline rank, or for the given ranks."""
    ranks = range(layout.pipeline) if ranks is None else ranks
    memories = memories_of(predictor, layout, ranks)
    limits = predictor.each_kind("memory", layout, partial(_limit, predictor.cluster))
    return [
        Room(rank, memory, limits[rank].usable, limits[rank].gpu, memory.host * limits[rank].gpus, limits[rank].host)
        for rank, memory in zip(ranks, memories, strict=True)
    ]


def memories_of(predictor: Predictor, layout: Layout, ranks: Sequence[int]) -> list[Memory]:
    """The memory of some pipeline ranks under the predictor's software."""
    if predictor.software.scores:
        return _megatron(predictor, layout, ranks)
    if predictor.software.name == TORCHTITAN.name:
        return _torchtitan(predictor, layout, ranks)
    memories = predictor.rank_memory(layout).of(Partition(layout.partition), ranks)
    return predictor.cluster.evidence.measured(memories, layout, ranks)


class _Limit(NamedTuple):
    """What the nodes of a pipeline rank have: bytes for tensors, GPUs per node, and host memory if it is known."""

    usable: int
    gpu: str
    gpus: int
    host: int | None


def _limit(cluster: Cluster, seats: Sequence[Seat]) -> _Limit:
    gpus = {seat.nodes.type: cluster.gpu_of(seat.nodes) for seat in seats}.values()
    smallest = min(gpus, key=lambda gpu: gpu.memory or 0)
    known = [seat.nodes.host_gib for seat in seats if seat.nodes.host_gib is not None]
    has = int(min(known) * GIB) if known else None
    return _Limit(usable(smallest.memory or 0), smallest.name, max(seat.nodes.gpus for seat in seats), has)


def deciding_ranks(predictor: Predictor, layout: Layout) -> list[int]:
    """The pipeline ranks that decide whether a layout fits: of ranks with the same GPUs and layers the fullest ones.

    The first and last rank of the pipeline are always included, because they hold the embedding and the head. Among the
    others, the first keeps the most micro-batches, and the last keeps the most that wait for their weight gradients. If
    layers differ, all ranks decide.
    """
    if len({layer.mlp for layer in predictor.recipe.model.blocks.layers}) > 1:
        return list(range(layout.pipeline))
    alike: dict[tuple[object, ...], list[int]] = {}
    ends = (0, layout.pipeline - 1)
    for rank, kinds in enumerate(predictor.each_kind("types", layout, _types)):
        layers = layout.partition[rank :: layout.pipeline]
        alike.setdefault((kinds, layers, rank if rank in ends else None), []).append(rank)
    late = layout.schedule == "zero-bubble"
    return sorted({rank for same in alike.values() for rank in ((same[0], same[-1]) if late else (same[0],))})


def _types(seats: Sequence[Seat]) -> tuple[str, ...]:
    return tuple(sorted({seat.nodes.type for seat in seats}))


def fits(predictor: Predictor, layout: Layout) -> bool:
    """Whether the layout fits on every rank."""
    return all(room.fits for room in rooms(predictor, layout, deciding_ranks(predictor, layout)))


def usable(memory: int) -> int:
    """Bytes of a device that are available for tensors; a process reserves less on a small device."""
    return memory - min(RESERVED, memory // 8)


def outside_pytorch(cluster: Cluster) -> int:
    """Bytes that the driver counts for a process in addition to PyTorch's memory."""
    return int(max(OUTSIDE_GIB[cluster.inside(nodes).transport] for nodes in cluster.nodes) * GIB)


def lacking(found: list[Room]) -> int:
    """Bytes that the fullest rank, or a node's host memory, has too few."""
    hosts = [room.host - room.host_usable for room in found if room.host_usable is not None]
    return max([room.memory.total - room.usable for room in found] + hosts)


def reason(found: list[Room]) -> str | None:
    """Why a layout does not fit; None if it fits."""
    room = max(found, key=lambda room: room.memory.total - room.usable)
    for each in found:
        if each.host_usable is not None and each.host > each.host_usable:
            what = "checkpoint.memory_every needs" if each.memory.memory_copies else "optim.offload needs"
            if each.memory.host > each.memory.memory_copies > 0:
                what = "optim.offload and checkpoint.memory_every need"
            return (
                f"{what} {units.size(each.host)} of host memory per node at pipeline rank {each.rank}, "
                f"but a node has {units.size(each.host_usable)}"
            )
    if room.fits:
        return None
    kind, most = max(room.memory.by_kind().items(), key=lambda item: item[1])
    return (
        f"{units.size(room.memory.total - room.usable)} too much: pipeline rank {room.rank} needs "
        f"{units.size(room.memory.total)}, but {room.gpu} has {units.size(room.usable)}; the largest part is "
        f"{kind.replace('_', ' ')} ({units.size(most)})"
    )


def _megatron(predictor: Predictor, layout: Layout, ranks: Sequence[int]) -> list[Memory]:
    """The memory of some pipeline ranks under Megatron-LM or Megatron-DeepSpeed, by kind."""
    recipe, software, step = predictor.recipe, predictor.software, predictor.step(layout)
    weights, gradients, state = MEGATRON_BYTES[recipe.train.precision]
    shards = layout.data * layout.context if layout.zero else 1
    layer = _MegatronLayer(recipe, layout, software)
    found = []
    for rank in ranks:
        held = step.held(layout.partition, rank)
        states = fullest(layout.schedule, layout.pipeline, layout.virtual, step.table.micro_batches, rank)
        layers = layout.partition[rank :: layout.pipeline]
        kept = max(sum(n * count for n, count in zip(state_, layers, strict=False)) for state_ in states)
        in_flight = max(sum(state_[: layout.virtual]) for state_ in states)
        head = layer.head() if rank == layout.pipeline - 1 else 0
        found.append(
            Memory(
                weights=weights * held,
                working_copies=0,
                gradients=gradients * held,
                optimizer=-(-state * held // shards),
                activations=kept * layer.kept(layout.recompute),
                # The loss is freed before the backward passes of the layers begin: only the larger of the two counts.
                temporaries=max(0, layer.temporaries() - head) if any(layers) else 0,
                head_and_loss=head,
                layer_buffers=gradients * min(held, BUCKET) if software.flat_gradients and layout.data > 1 else 0,
                exchange_buffers=layer.exchanged() * in_flight if layout.pipeline > 1 else 0,
                host=0,
            )
        )
    return found


class _MegatronLayer:
    """Bytes of one micro-batch on one rank under Megatron."""

    def __init__(self, recipe: Recipe, layout: Layout, software: Software) -> None:
        model, self.layout, self.software = recipe.model, layout, software
        self.each, self.t = working_bytes(recipe), layout.tensor
        tokens = layout.micro_batch * recipe.data.sequence_length
        self.stream = tokens * model.hidden
        self.along = self.t if layout.sequence_parallel else 1
        self.inside = tokens * model.ffn // self.t
        self.scores = model.heads // self.t * tokens * recipe.data.sequence_length
        self.logits = tokens * model.padded_vocab // self.t
        self.masks = 2 if model.dropout else 0
        self.score_bytes = self.each + (1 + self.each if model.attention_dropout else 0)

    def kept(self, recompute: str | int) -> int:
        """Activations saved between the forward and backward pass of a layer."""
        if recompute == "full":
            return self.each * self.stream // self.along
        whole = self.stream * (4 * self.each + self.masks) // self.along
        whole += self.each * (4 * self.stream // self.t + self.software.inner_kept * self.inside)
        return whole if recompute == "selective" else whole + self.score_bytes * self.scores

    def temporaries(self) -> int:
        """Recomputed activations, and gradients inside the layer, during its backward pass.

        The gradients of the scores before and after softmax are the largest. At that point the MLP has freed its saved
        tensors: its input before and after the norm, and its hidden activations.
        """
        again = self.kept("none") - self.kept(self.layout.recompute)
        freed = self.each * (2 * self.stream // self.along + self.software.inner_kept * self.inside)
        return again + max(0, 2 * self.each * self.scores - freed)

    def head(self) -> int:
        """Logits in the working precision, in fp32 if that differs, and their softmax; and the final norm.

        DeepSpeed's last stage has two buffers; the second one holds the logits of the previous micro-batch.
        """
        copied = 0 if self.each == FP32 else FP32
        return self.logits * (self.each + copied + FP32 * (1 + self.software.logits_left)) + 2 * self.each * self.stream

    def exchanged(self) -> int:
        """What a rank received and sent for a micro-batch in flight, if the program keeps these tensors."""
        return 2 * self.each * self.stream // self.t if self.software.flat_gradients else 0


def _torchtitan(predictor: Predictor, layout: Layout, ranks: Sequence[int]) -> list[Memory]:
    """The memory of some pipeline ranks under TorchTitan at the fullest moment, by kind."""
    recipe = layout.applied(predictor.recipe)
    micro_batches = predictor.micro_batches(layout)
    return [max(_moments(recipe, layout, micro_batches, rank), key=lambda moment: moment.total) for rank in ranks]


def _moments(recipe: Recipe, layout: Layout, micro_batches: int, rank: int) -> list[Memory]:
    """TorchTitan's memory during the loss, the backward pass and the optimizer step."""
    stages = range(rank, layout.pipeline * layout.virtual, layout.pipeline)
    parts = [stage_parameters(recipe, stage, layout.tensor) for stage in stages]
    held, layer = sum(part.total for part in parts), max(part.layer for part in parts)
    root = sum(part.ends for part in parts)
    share = -(-held // (layout.data * layout.context))
    tokens = layout.micro_batch * recipe.data.sequence_length // layout.context
    piped = layout.pipeline > 1
    kept = tokens * _torchtitan_kept(recipe, layout, micro_batches, rank)
    gathered = WORKING * (held if piped else root)
    sums = FP32 * held if piped else 0
    last = layout.pipeline * layout.virtual - 1 in stages
    logits = LOGIT_BYTES * (tokens * recipe.model.padded_vocab // layout.tensor) if last else 0
    again = activations.layer(recipe) if layout.recompute != "none" else 0
    temporaries = tokens * (again + activations.temporaries(recipe))
    # The current layer, the next one and its flat gather buffer; a gradient, and its fp32 copy to be reduced.
    buffers = ((0 if piped else 3 * WORKING) + WORKING + FP32) * layer
    ends = WORKING * root if last else 0
    always = {
        "weights": FP32 * share,
        "working_copies": gathered,
        "optimizer": 2 * FP32 * share,
        "exchange_buffers": 2 * micro_batches * tokens * activations.widths(recipe).stream if piped else 0,
    }
    loss = {"gradients": sums, "activations": kept, "head_and_loss": logits, "layer_buffers": WORKING * layer}
    backward = {
        "gradients": sums + ends, "activations": kept, "temporaries": temporaries, "layer_buffers": buffers
    }  # fmt: skip
    update = {"gradients": FP32 * share, "temporaries": FP32 * share, "layer_buffers": (WORKING + FP32) * root}
    return [_reserved(always | moment) for moment in (loss, backward, update)]


def _reserved(sizes: dict[str, int]) -> Memory:
    """Memory that the allocator reserves for tensors of these sizes; kinds that are not listed are 0."""
    empty = {"activations": 0, "temporaries": 0, "head_and_loss": 0}
    return Memory(**{kind: int(size * (1 + FRAGMENTATION)) for kind, size in (empty | sizes).items()}, host=0)


def _torchtitan_kept(recipe: Recipe, layout: Layout, micro_batches: int, rank: int) -> int:
    """Bytes per token that the layers of a rank keep for all micro-batches in flight."""
    layers = layout.partition[rank :: layout.pipeline]
    states = fullest(layout.schedule, layout.pipeline, layout.virtual, micro_batches, rank)
    count = max(sum(n * each for n, each in zip(state, layers, strict=False)) for state in states)
    return count * torchtitan_layer_kept(recipe)


def torchtitan_layer_kept(recipe: Recipe) -> int:
    """Bytes per token that a layer keeps under TorchTitan.

    Selective recomputation keeps the input of a layer, the output of attention, every second matrix product, and the
    results of reductions over tensor ranks.
    """
    how, of = recipe.parallel.recompute, activations.widths(recipe)
    if how == "full":
        return of.stream
    if how != "selective":
        return activations.layer(recipe)
    if not recipe.model.blocks.layers[0].mlp.gated:
        products = [of.query + 2 * of.key, of.gathered, of.ffn, of.gathered]
    else:
        products = [of.query, of.key, of.key, of.gathered, of.ffn, of.ffn, of.gathered]
    summed = 2 * of.stream if recipe.parallel.tensor > 1 else 0
    return of.stream + of.query + of.log_sum + sum(products[::2]) + summed
