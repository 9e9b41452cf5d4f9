"""The peak memory of each rank, by kind.

Not all kinds peak at the same time: `not_at_once` is the difference between their sum and the fullest moment of a step
(`memory_moments.py`). The formulas follow `parallel/`; docs/sizes.md lists them and how they were checked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from operator import mul

from steelyard.core.recipe import Recipe
from steelyard.core.recipe.optimizers import GRADIENT_BYTES, OPTIMIZERS, STATE_BYTES
from steelyard.core.recipe.parallel_section import Partition
from steelyard.sizes import activations, head_memory, layer_backward, memory_copies, sparsity_memory
from steelyard.sizes.activations import FP32, working_bytes
from steelyard.sizes.adapter_size import adapter_size
from steelyard.sizes.gpu_catalogue import GIB
from steelyard.sizes.in_flight import fullest
from steelyard.sizes.memory_moments import MomentSizes, peak
from steelyard.sizes.param_count import layer_matrices
from steelyard.sizes.rank_check import data_ranks
from steelyard.sizes.stage_layers import StageSizes, layers_of, partition_of

TOKEN_ID = 8
LOGITS = {"2:4": 1.5, "1:4": 1.0}  # mask logits per weight for learned masks
# Memory of a process outside its tensors: CUDA context, library workspaces, fragmentation.
RESERVED = 2 * GIB


@dataclass(frozen=True)
class Memory:
    """Bytes on the device of one rank by kind, and in host memory."""

    weights: int
    working_copies: int
    gradients: int
    optimizer: int
    activations: int
    temporaries: int
    head_and_loss: int
    layer_buffers: int
    exchange_buffers: int
    host: int
    memory_copies: int = 0
    """The part of `host` for memory checkpoints."""
    not_at_once: int = 0
    """The peak minus the sum of the other kinds: at most 0, unless the peak was measured."""

    @property
    def total(self) -> int:
        """The peak on the device: the sum of all kinds."""
        return int(sum(vars(self).values())) - self.host - self.memory_copies

    def by_kind(self) -> dict[str, int]:
        """Bytes on the device, by kind."""
        return {kind: size for kind, size in vars(self).items() if kind not in ("host", "memory_copies")}


def micro_batches(recipe: Recipe, world: int) -> int:
    """Micro-batches per step on one data-parallel rank."""
    return recipe.train.global_batch // (recipe.train.micro_batch * data_ranks(recipe, world))


def memory_of(recipe: Recipe, world: int, ranks: Iterable[int] | None = None) -> list[Memory]:
    """The peak memory of each pipeline rank, or of the given ones; all ranks of a pipeline rank need the same."""
    wanted = range(recipe.parallel.pipeline) if ranks is None else ranks
    shared, partition = SharedSizes(recipe, world), partition_of(recipe)
    return [RankPeak(shared, partition, rank).memory() for rank in wanted]


class SharedSizes:
    """Values that all pipeline ranks and all partitions of a recipe share."""

    def __init__(self, recipe: Recipe, world: int, stages: StageSizes | None = None) -> None:
        self.recipe, self.data_ranks = recipe, data_ranks(recipe, world)
        self.micro_batches = recipe.train.global_batch // (recipe.train.micro_batch * self.data_ranks)
        self.stages = stages or StageSizes(recipe, recipe.parallel.tensor, recipe.parallel.expert)
        self.per_token = activations.per_token(recipe)
        self.adapter = adapter_size(recipe, working_bytes(recipe))
        self.matrices = layer_matrices(recipe.model) // recipe.parallel.tensor
        self._in_flight: dict[int, int] = {}

    def states(self, rank: int) -> tuple[tuple[int, ...], ...]:
        """The micro-batches in flight on a pipeline rank at its fullest moments."""
        parallel = self.recipe.parallel
        return fullest(parallel.schedule, parallel.pipeline, parallel.virtual, self.micro_batches, rank)

    def in_flight(self, rank: int) -> int:
        """The most micro-batches on the stages of a pipeline rank that wait for their backward pass."""
        if rank not in self._in_flight:
            self._in_flight[rank] = max(sum(state[: self.recipe.parallel.virtual]) for state in self.states(rank))
        return self._in_flight[rank]


class RankPeak:
    """One pipeline rank of a recipe, and the values that its memory depends on."""

    def __init__(self, shared: SharedSizes, partition: Partition, rank: int) -> None:
        self.shared, self.rank = shared, rank
        recipe = self.recipe = shared.recipe
        parallel = self.parallel = recipe.parallel
        self.each, self.per_token = working_bytes(recipe), shared.per_token
        self.stages = range(rank, parallel.stages, parallel.pipeline)
        self.is_last = parallel.stages - 1 in self.stages
        self.stage_layers = [layers_of(recipe, partition, stage) for stage in self.stages]
        self.parts = [
            shared.stages.of(stage, parallel.stages, layers)
            for stage, layers in zip(self.stages, self.stage_layers, strict=True)
        ]
        self.layers = [part.layers for part in self.parts]
        self.held = sum(part.total for part in self.parts)
        self.matrices = shared.matrices
        self.learns_masks = recipe.sparsity is not None and recipe.sparsity.method == "learned"
        share = LOGITS[recipe.sparsity.pattern] if recipe.sparsity is not None and self.learns_masks else 0.0
        self.layer_logits = int(self.matrices * share)
        self.logits = self.layer_logits * sum(self.layers)
        self.adapter = shared.adapter
        self.is_frozen = self.learns_masks or self.adapter is not None
        # Bytes of a stored parameter: frozen weights are stored in the working precision, or matrices quantized.
        self.weight_bytes = self.each if self.is_frozen else FP32
        self.trained = self.logits if self.learns_masks else self.held
        self.stored = self.weight_bytes * self.held + FP32 * self.logits
        if self.adapter is not None:
            self.trained = self.adapter.parameters * sum(self.layers)
            saved = self.each * self.matrices - self.adapter.matrix_bytes
            self.stored += FP32 * self.trained - saved * sum(self.layers)
        self.gradient_bytes = GRADIENT_BYTES[recipe.optim.gradients]
        self.columns = shared.data_ranks * parallel.context
        self.shards = self.columns // parallel.replicate if parallel.zero else 1
        # Experts that the expert axis splits are sharded over the ranks that hold the same ones, if there are any.
        self.experts = sum(part.experts for part in self.parts) if parallel.expert > 1 else 0
        self.expert_shards = self.shards // parallel.expert if parallel.zero else 1
        self.trained_experts = 0 if self.is_frozen else self.experts
        self.experts_are_whole = self.experts > 0 and self.columns == parallel.expert
        self.micro_batches, self.states = shared.micro_batches, shared.states(rank)
        self.tokens = recipe.train.micro_batch * recipe.data.sequence_length // parallel.context

    def memory(self) -> Memory:
        """The peak of the rank, by kind."""
        experts = self.weight_bytes * self.experts
        kept = -(-(self.stored - experts) // self.shards) - (-experts // self.expert_shards)
        sharded = FP32 * self._share(self.trained)
        state = int(STATE_BYTES[self.recipe.optim.state] * self._optimizer_states())
        offload = self.recipe.optim.offload
        logits = head_memory.logits_chunk(self.recipe, self.tokens) if self.is_last else 0
        saved = sharded + FP32 * self._optimizer_states()
        copies = memory_copies.on_host(self.recipe, saved, self.columns, self.shards)
        joint = sparsity_memory.joint(self.recipe, self.held, sum(part.ends for part in self.parts), self.columns)
        masks = -(-(joint.masks * self.matrices * sum(self.layers) + joint.teacher) // self.shards)
        memory = Memory(
            weights=kept + masks,
            working_copies=self._working_copies() + self._masked_weights() + joint.gathered_teacher,
            gradients=self._gradients(),
            optimizer=0 if offload else state,
            activations=self._most(self._kept, self._held_for_weights),
            temporaries=self._temporaries(),
            head_and_loss=logits + sum(self._head_gradients()),
            layer_buffers=self._layer_buffers(),
            exchange_buffers=self._exchange_buffers() + memory_copies.on_device(self.recipe, saved),
            host=copies + (state + 2 * sharded if offload else 0),
            memory_copies=copies,
        )
        more = peak(self._moments(memory)) - memory.total
        return replace(memory, temporaries=memory.temporaries + max(0, more), not_at_once=min(0, more))

    def _moments(self, memory: Memory) -> MomentSizes:
        """The sizes of the moments of a step."""
        in_flight = self.shared.in_flight(self.rank)
        tables, table = self._head_gradients()
        accumulates = self._accumulates()
        sharded = self.gradient_bytes * self._share(self.trained)
        unsharded = self.gradient_bytes * self.trained
        whole = unsharded if accumulates or self.shards == 1 else sharded
        # After the first backward pass nothing more is added to the activations if all micro-batches are in flight.
        is_first = self.micro_batches * len(self.stages) <= in_flight
        layer, ends = (max(getattr(part, name) for part in self.parts) for name in ("layer", "ends"))
        whole_layer = layer - (max(part.layer_experts for part in self.parts) if self.experts_are_whole else 0)
        unit = 0 if self.is_frozen else layer
        held, is_shared = any(self.layers), self.columns > 1
        exchanged = self._layer_exchange()
        own_sum = self.gradient_bytes * -(-whole_layer // self.shards)
        # FSDP gathers again for every micro-batch with ZeRO 3, and waits for its last reduction only after the last.
        gathers = is_shared and (self.parallel.zero == 3 or self.micro_batches == 1)
        waits = not (is_shared and self.parallel.zero >= 2 and self.parallel.pipeline == 1 and not is_first)
        return MomentSizes(
            always=memory.weights + memory.optimizer + memory.exchange_buffers - exchanged,
            exchanged=exchanged,
            copies=memory.working_copies,
            activations=memory.activations,
            last_layer=self._last_layer(),
            head=self.tokens * (self.per_token.head - self.per_token.widths.stream) if self.is_last else 0,
            in_flight=in_flight,
            layers=sum(self.layers),
            before=0 if is_first else whole,
            unwaited=0 if waits or self.is_frozen else self._reduce_buffers(ends),
            after=unsharded if self.shards == 1 else max(sharded, whole if accumulates else 0),
            new=FP32 * unit if not is_shared and held else 0,
            logits=self._loss(memory.head_and_loss - tables - table, table),
            tables=tables,
            table=table,
            working=self._working(memory.temporaries) if held else 0,
            gathered=self.each * whole_layer if gathers and held else 0,
            gathering=2 * self.each * whole_layer if is_shared and self.parallel.zero == 3 and held else 0,
            summed=self._reduce_buffers(whole_layer) if is_shared and not self.is_frozen else 0,
            shard=0 if not is_shared or self.is_frozen or (self.shards == 1 and not is_first) else own_sum,
            unsummed=self.each * whole_layer if is_shared and not self.is_frozen else 0,
            freed=table - self.each * table // FP32 if is_shared else 0,
            end_buffers=self._layer_buffers(),
        )

    def _last_layer(self) -> int:
        """What the last layer of this rank keeps of one micro-batch."""
        layers = next((found for found in reversed(self.stage_layers) if found), range(0))
        if not layers:
            return 0
        known = self.per_token.layers
        of = known[layers.stop - 1] if layers.stop <= len(known) else self.per_token.largest
        return self.tokens * (of.kept if activations.layers_kept(self.recipe, len(layers)) else of.recomputed)

    def _loss(self, chunk: int, table: int) -> int:
        """The memory of the loss beside the gradients of the head, given that of a chunk of logits.

        The loss casts the head, unless FSDP has gathered it in the working precision. The first chunk adds its part of
        the head's gradient after the softmax, of which only the logits and their gradient are left by then.
        """
        is_cast = self.is_last and self.columns == 1 and self.each != self.weight_bytes
        cast = head_memory.cast_head(self.recipe) if is_cast else 0
        if chunk and head_memory.is_one_chunk(self.recipe, self.tokens):
            chunk = max(chunk - table, head_memory.logits_and_gradient(self.recipe, self.tokens))
        return chunk + cast

    def _working(self, temporaries: int) -> int:
        """What the backward pass of one layer adds, given its temporaries and what is recomputed for it."""
        largest = self.per_token.largest
        experts, layer = (max(getattr(part, name) for part in self.parts) for name in ("layer_experts", "layer"))
        if activations.is_backward_counted(self.recipe):
            own = layer_backward.weights_of(self.recipe, layer, experts, self.columns == 1, self.experts_are_whole)
            recomputed = temporaries - self.tokens * largest.temporaries
            return recomputed + layer_backward.working(self.recipe, self.per_token, self.tokens, own)
        buffers = self._layer_buffers(ends=False)
        if self.columns > 1:
            gathered = 2 * self.each * layer if self.parallel.zero == 3 and not self.is_frozen else 0
            buffers -= self._reduce_buffers(0 if self.is_frozen else layer) + gathered
        new = FP32 * layer if self.columns == 1 and not self.is_frozen else 0
        return temporaries + max(0, buffers) + new

    def _optimizer_states(self) -> int:
        """Numbers of optimizer state of this rank; an optimizer may keep fewer of them for the matrices of layers."""
        spec = OPTIMIZERS[self.recipe.optim.name]
        matrices = 0 if self.is_frozen else sum(part.matrices for part in self.parts)
        return spec.states * self._share(self.trained) - (spec.states - spec.matrix_states) * self._share(matrices)

    def _share(self, parameters: int) -> int:
        """The shard of this rank of trained parameters."""
        others = parameters - self.trained_experts
        return -(-others // self.shards) - (-self.trained_experts // self.expert_shards)

    def _most(self, waiting: Callable[[int], int], held: Callable[[int], int]) -> int:
        """The maximum over all states of the bytes of micro-batches in flight, given the bytes of one on each stage."""
        locals_ = range(len(self.stages))
        sizes = [*map(waiting, locals_), *map(held, locals_)]
        return max(int(sum(map(mul, each, sizes))) for each in self.states)

    def _working_copies(self) -> int:
        """Weights in the working precision, in addition to the fp32 weights.

        Sharded weights are gathered for a whole step or, with ZeRO 3 and no pipeline, for one layer at a time; the
        embedding and head are gathered together and stay. A rank without data-parallel peers casts its weights in each
        forward pass, and autograd saves these copies for the backward pass; experts that no other rank holds, too.
        """
        if self.columns > 1:
            cast = self._cast_experts() if self.experts_are_whole else 0
            if self.parallel.zero == 3 and self.parallel.pipeline == 1:
                return self.each * sum(part.ends for part in self.parts) + cast
            held = self.held - (self.experts if self.experts_are_whole else 0)
            return self.stored if self.is_frozen else self.each * held + cast
        if self.each == self.weight_bytes:
            return 0 if self.each == FP32 or self.adapter is None else self.each * self.trained

        if self.recipe.train.precision != "fp8":
            return self._most_casts([self.each * part.all_layers for part in self.parts])
        # fp8 products save their weights in fp8; compiled layers cast them again in the backward pass.
        fp8 = 0 if activations.is_compiled(self.recipe) else 1
        return self._most_casts(
            [fp8 * (part.all_layers - part.experts) + self.each * part.experts for part in self.parts]
        )

    def _cast_experts(self) -> int:
        """Experts in the working precision, which autograd saves."""
        if self.each == self.weight_bytes:
            return 0
        return self._most_casts([self.each * part.experts for part in self.parts])

    def _most_casts(self, sizes: list[int]) -> int:
        """Cast copies, given their bytes in the layers of each stage, without those of recomputed layers."""

        def kept(local: int) -> int:
            layers = self.layers[local]
            return sizes[local] * activations.layers_kept(self.recipe, layers) // max(1, layers)

        return self._most(kept, lambda local: sizes[local])

    def _masked_weights(self) -> int:
        """Masked weights, which the backward pass needs; fixed masks are saved too. Joint training has none."""
        if self.recipe.sparsity is None or self.recipe.sparsity.method == "joint":
            return 0
        size = self.matrices * (self.each if self.learns_masks else self.each + 1)

        def masked(local: int) -> int:
            return size * activations.layers_kept(self.recipe, self.layers[local])

        return self._most(masked, lambda local: size * self.layers[local])

    def _gradients(self) -> int:
        """Gradients: unsharded while micro-batches accumulate, unless ZeRO 2 reduces after each of them.

        Stages of torch.distributed.pipelining reduce once per step for every `zero`.
        """
        whole, sharded = (self.gradient_bytes * size for size in (self.trained, self._share(self.trained)))
        if self.shards == 1:
            return whole
        if not self._accumulates():
            return sharded
        # Experts of this rank alone are not reduced.
        return whole + sharded - (self.gradient_bytes * self.trained_experts if self.expert_shards == 1 else 0)

    def _accumulates(self) -> bool:
        """Whether unsharded gradients add up over micro-batches."""
        return self.micro_batches > 1 and (self.parallel.zero == 1 or self.parallel.pipeline > 1) and self.shards > 1

    def _kept(self, local: int) -> int:
        """Bytes of activations of one micro-batch between the forward and backward pass of a stage."""
        of = self.per_token
        last = self.stages[local] == self.parallel.stages - 1
        kept = of.stage(self.stage_layers[local]) + (of.head if last else of.widths.stream)
        kept += of.rotation // self.recipe.train.micro_batch
        return self.tokens * (kept + 2 * TOKEN_ID) + self._mask()

    def _held_for_weights(self, local: int) -> int:
        """Bytes of one micro-batch that waits only for its weight gradients.

        Recomputed activations stay in memory until then.
        """
        of = self.per_token
        head = of.head if self.stages[local] == self.parallel.stages - 1 else 0
        return self.tokens * (self.layers[local] * (of.largest.kept + of.largest.weight_gradient_inputs) + head)

    def _mask(self) -> int:
        """The document mask, as booleans and in the working precision."""
        pairs = self.tokens * self.recipe.data.sequence_length
        return pairs * (1 + self.each) if self.recipe.data.mask_documents else 0

    def _temporaries(self) -> int:
        """Temporaries of one layer, and the activations of the layer that is recomputed."""
        if not any(self.layers):
            return 0
        again = any(activations.layers_kept(self.recipe, layers) < layers for layers in self.layers)
        largest = self.per_token.largest
        return self.tokens * (largest.temporaries + (largest.kept if again else 0))

    def _head_gradients(self) -> tuple[int, int]:
        """The gradients of the head that micro-batches in flight keep, and one such gradient."""
        if self.is_frozen or not self.is_last:
            return 0, 0
        table, last = head_memory.head_gradient(self.recipe), len(self.stages) - 1
        return self._most(lambda local: table if local == last else 0, lambda local: 0), table

    def _layer_buffers(self, ends: bool = True) -> int:
        """Buffers to cast, gather and reduce the weights and gradients of one layer at a time.

        The embedding, final norm and head of a stage are one unit, and so are experts that the expert axis splits. If
        no other rank holds them, they are only cast, in both passes.
        """
        experts = max(part.layer_experts for part in self.parts) if self.experts else 0
        layer = max(part.layer for part in self.parts)
        outer = max(part.ends for part in self.parts) if ends else 0
        unit = max(layer - experts, experts, outer)
        if self.learns_masks:
            # Weights and mask logits of a layer, three times with ZeRO 3, and the gradient of the mask logits.
            size = self.each * layer + FP32 * self.layer_logits
            return (3 if self.parallel.zero == 3 and self.columns > 1 else 1) * size + FP32 * self.layer_logits
        if self.adapter is not None:
            size = self.adapter.matrix_bytes + FP32 * self.adapter.parameters
            gathers = (3 if self.parallel.zero == 3 else 1) if self.columns > 1 else 0
            return self.adapter.product_bytes + gathers * size + FP32 * self.adapter.parameters
        if self.columns == 1:
            return 0 if self.each == FP32 else 2 * self.each * unit
        cast = 0
        if self.experts_are_whole:
            unit, layer = max(layer - experts, outer), layer - experts
            cast = 0 if self.each == FP32 else 2 * self.each * experts
        # ZeRO 3: the current layer, and the flat gather buffer of the next one.
        gathering = 2 * self.each * layer if self.parallel.zero == 3 else 0
        return gathering + self.each * unit + self._reduce_buffers(unit) + cast

    def _reduce_buffers(self, unit: int) -> int:
        """The flat sum of a unit's gradients over ranks; FSDP casts its own shard of a bf16 sum to fp32 and back."""
        casts = 0 if self.gradient_bytes == FP32 else (self.gradient_bytes + FP32) * -(-unit // self.shards)
        return self.gradient_bytes * unit + casts

    def _exchange_buffers(self) -> int:
        """Communication buffers for activations.

        torch.distributed.pipelining allocates the buffers for all micro-batches at the beginning of a step: one for the
        activations from the previous stage, one for the gradients from the next stage.
        """
        parallel, of = self.parallel, self.per_token.widths
        links = sum((stage > 0) + (stage < parallel.stages - 1) for stage in self.stages)
        per_token = links * self.micro_batches * of.stream
        return self.tokens * per_token + self._layer_exchange()

    def _layer_exchange(self) -> int:
        """What a layer exchanges with ranks that hold parts of it or of its sequence; no other layer does meanwhile."""
        parallel, of = self.parallel, self.per_token.widths
        per_token = 2 * of.gathered if parallel.tensor > 1 else 0
        # Keys and values are gathered and reordered along the sequence; their gradients take the same path back.
        per_token += 4 * of.key * parallel.context if parallel.context > 1 else 0
        per_token += self.per_token.exchanged_slots if parallel.expert > 1 else 0
        return self.tokens * per_token
