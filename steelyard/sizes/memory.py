"""How much memory each rank needs at its fullest moment, by kind.

The sum of kinds is an upper bound: not all of them are largest in the same moment. Formulas and how they were checked
stand in docs/sizes.md.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from steelyard.core.errors import UserError
from steelyard.core.recipe import Recipe
from steelyard.sizes import activations
from steelyard.sizes.activations import FP32, working_bytes
from steelyard.sizes.schedule import InFlight, in_flight
from steelyard.sizes.stages import partition_of, stage_parameters

CHUNK_TOKENS = 2048
STATES = {"adamw": 2, "sgd": 1, "sgd-sai": 1}
TOKEN_ID = 8


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank's device by kind, and in the memory of its host."""

    weights: int
    working_copies: int
    gradients: int
    optimizer: int
    activations: int
    temporaries: int
    logits: int
    communication: int
    host: int

    @property
    def total(self) -> int:
        """All kinds on the device together."""
        return sum(self.by_kind().values())

    def by_kind(self) -> dict[str, int]:
        """Bytes on the device, by kind."""
        return {kind: size for kind, size in asdict(self).items() if kind != "host"}


def data_ranks(recipe: Recipe, world: int) -> int:
    """Data-parallel ranks in a world of so many; a world that the plan cannot fill is refused."""
    parallel, train = recipe.parallel, recipe.train
    data, left = divmod(world, parallel.model_ranks)
    if left or data == 0 or (parallel.data is not None and data != parallel.data):
        mesh = f"tensor {parallel.tensor} x context {parallel.context} x pipeline {parallel.pipeline}"
        fixed = "" if parallel.data is None else f" x data {parallel.data}"
        needed = f"{parallel.least_world}" if fixed else f"a multiple of {parallel.model_ranks}"
        raise UserError(
            f"{mesh}{fixed} needs {needed} ranks, not {world}",
            where=recipe.where("parallel"),
            mend="change one of them",
        )
    if train.global_batch % (train.micro_batch * data):
        raise UserError(
            f"{train.global_batch} is not a multiple of train.micro_batch x {data} data-parallel ranks",
            where=recipe.where("train.global_batch"),
            mend=f"choose a multiple of {train.micro_batch * data}, or another number of ranks",
        )
    if data % parallel.replicate:
        raise UserError(
            f"{data} data-parallel ranks do not form {parallel.replicate} equal groups",
            where=recipe.where("parallel.replicate"),
            mend=f"choose a divisor of {data}",
        )
    return data


def memory_of(recipe: Recipe, world: int) -> list[Memory]:
    """The peak memory of a rank, for each pipeline rank: those that share one hold the same."""
    return [_rank(recipe, world, rank) for rank in range(recipe.parallel.pipeline)]


def _rank(recipe: Recipe, world: int, rank: int) -> Memory:
    parallel, each = recipe.parallel, working_bytes(recipe)
    stages = range(rank, parallel.stages, parallel.pipeline)
    held = sum(stage_parameters(recipe, stage, parallel.tensor).total for stage in stages)
    shards = data_ranks(recipe, world) * parallel.context // parallel.replicate if parallel.zero else 1
    gathered = shards > 1 and parallel.zero < 3
    reduced = held // shards * FP32
    state = STATES[recipe.optim.name] * reduced
    offload = recipe.optim.offload
    return Memory(
        weights=reduced,
        working_copies=each * held if gathered else 0,
        gradients=reduced if parallel.zero >= 2 else FP32 * held,
        optimizer=0 if offload else state,
        activations=_activations(recipe, world, rank),
        temporaries=_temporaries(recipe, rank),
        logits=_logits(recipe) if parallel.stages - 1 in stages else 0,
        communication=_layer_buffers(recipe, shards, rank) + _exchange(recipe, world, rank),
        host=state + 2 * reduced if offload else 0,
    )


def _tokens(recipe: Recipe) -> int:
    """Tokens of a micro-batch that one rank sees."""
    return recipe.train.micro_batch * recipe.data.sequence_length // recipe.parallel.context


def micro_batches(recipe: Recipe, world: int) -> int:
    """Micro-batches of a step that one data-parallel rank sees."""
    return recipe.train.global_batch // (recipe.train.micro_batch * data_ranks(recipe, world))


def _activations(recipe: Recipe, world: int, rank: int) -> int:
    """What micro-batches in flight keep, at the moment when that is most."""
    parallel = recipe.parallel
    stages = range(rank, parallel.stages, parallel.pipeline)
    waiting = [_kept(recipe, stage) for stage in stages]
    held = [_held(recipe, stage) for stage in stages]

    def size(state: InFlight) -> int:
        number = zip((*state.waiting, *state.held), (*waiting, *held), strict=True)
        return sum(count * kept for count, kept in number)

    return max(size(state) for state in in_flight(parallel, micro_batches(recipe, world), rank))


def _kept(recipe: Recipe, stage: int) -> int:
    """Bytes that one micro-batch keeps between a stage's forward and backward pass."""
    last = stage == recipe.parallel.stages - 1
    _, kept = activations.recomputed(recipe, partition_of(recipe).counts[stage])
    kept += activations.head(recipe) if last else activations.widths(recipe).stream
    kept += activations.rotation(recipe) // recipe.train.micro_batch
    return _tokens(recipe) * (kept + 2 * TOKEN_ID) + _mask(recipe)


def _held(recipe: Recipe, stage: int) -> int:
    """Bytes that one micro-batch keeps when only the gradients of the weights are left to compute.

    What was computed again for the backward pass stays until then.
    """
    layers = partition_of(recipe).counts[stage]
    each = activations.layer(recipe) + activations.weight_gradient_inputs(recipe)
    head = activations.head(recipe) if stage == recipe.parallel.stages - 1 else 0
    return _tokens(recipe) * (layers * each + head)


def _mask(recipe: Recipe) -> int:
    """The mask that keeps documents apart, as truth values and as numbers."""
    length = recipe.data.sequence_length
    pairs = recipe.train.micro_batch * length * length // recipe.parallel.context
    return pairs * (1 + working_bytes(recipe)) if recipe.data.mask_documents else 0


def _temporaries(recipe: Recipe, rank: int) -> int:
    """What comes and goes within one layer, and the layer that is being computed again."""
    counts = partition_of(recipe).counts[rank :: recipe.parallel.pipeline]
    if not any(counts):
        return 0
    again, _ = activations.recomputed(recipe, max(counts))
    computing = activations.layer(recipe) if again or recipe.parallel.recompute == "selective" else 0
    return _tokens(recipe) * (activations.temporaries(recipe) + computing)


def _logits(recipe: Recipe) -> int:
    """One chunk of logits: the loss never has more of them at once."""
    vocabulary = recipe.model.padded_vocab // recipe.parallel.tensor
    return min(CHUNK_TOKENS, _tokens(recipe)) * vocabulary * (FP32 + working_bytes(recipe))


def _layer_buffers(recipe: Recipe, shards: int, rank: int) -> int:
    """Weights and gradients of single layers on their way: gathered, cast and reduced a layer (or table) at a time."""
    parallel, each = recipe.parallel, working_bytes(recipe)
    parts = [
        stage_parameters(recipe, stage, parallel.tensor) for stage in range(rank, parallel.stages, parallel.pipeline)
    ]
    largest = max(max(part.layer if part.layers else 0, part.embedding, part.head) for part in parts)
    if shards == 1:
        # Copies in 16 bits are made for a layer at a time, and so are its gradients before they are added up.
        return 0 if each == FP32 else 2 * each * largest
    # zero 3: the layer at work, the next one, and the flat buffer that one arrived in.
    gathering = 3 * each * largest if parallel.zero == 3 else 0
    return gathering + (each + FP32) * largest


def _exchange(recipe: Recipe, world: int, rank: int) -> int:
    """Activations on their way between ranks.

    torch.distributed.pipelining makes the buffers for all micro-batches of a step at its beginning: one for what a
    stage receives from the stage before, one for the gradient it receives from the stage behind.
    """
    parallel, of, each = recipe.parallel, activations.widths(recipe), working_bytes(recipe)
    first = sum(stage > 0 for stage in range(rank, parallel.stages, parallel.pipeline))
    links = first + sum(stage < parallel.stages - 1 for stage in range(rank, parallel.stages, parallel.pipeline))
    per_token = links * micro_batches(recipe, world) * of.stream
    per_token += 2 * of.gathered if parallel.tensor > 1 else 0
    if parallel.context > 1:
        # Two blocks of keys and values travel round the ring, and in the backward pass their gradients in fp32.
        per_token += 4 * of.key + 2 * of.key * FP32 // each
    return _tokens(recipe) * per_token
