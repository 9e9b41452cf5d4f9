"""Checks between sections. Each function checks one kind of contradiction and raises `contradiction`."""

from __future__ import annotations

from steelyard.core.recipe.blocks import ExpertsBlock
from steelyard.core.recipe.finetune_section import FinetuneSection
from steelyard.core.recipe.model_section import ModelConfig
from steelyard.core.recipe.optim_section import OptimSection
from steelyard.core.recipe.parallel_section import ParallelSection
from steelyard.core.recipe.section import contradiction
from steelyard.core.recipe.sparsity_section import SparsitySection
from steelyard.core.recipe.train_section import TrainSection

VALIDATION_SAMPLES = 256


def steps(train: TrainSection, sequence_length: int) -> int:
    """The steps of a run, computed from its samples or tokens if one is set."""
    samples = train.samples if train.tokens is None else train.tokens // sequence_length
    if samples is None:
        return train.steps
    wanted = train.steps_for(samples)
    unit = "samples" if train.tokens is None else "tokens"
    if "steps" in train.model_fields_set and train.steps != wanted:
        raise contradiction(
            "train.steps",
            f"is {train.steps}, but train.{unit} = {getattr(train, unit)} gives {wanted} steps",
            f"set steps or {unit}, not both",
        )
    return wanted


def validation_batches(global_batch: int) -> int:
    """The default of `eval.batches`: ten, or as many as hold `VALIDATION_SAMPLES`, at least one."""
    return min(10, -(-VALIDATION_SAMPLES // global_batch))


def pipeline(model: ModelConfig, parallel: ParallelSection, train: TrainSection) -> None:
    """The partition matches the model, and the schedule supports its stages."""
    partition, stages = parallel.partition, parallel.stages
    most = 2 * model.layers + 64  # Some may be empty; many more are a mistake.
    if stages > most:
        raise contradiction(
            "parallel.pipeline",
            f"most of the {stages} stages would be empty: model.layers is {model.layers}",
            f"set parallel.pipeline x parallel.virtual to {most} at most",
        )
    if partition is not None and partition.stages != stages:
        raise contradiction(
            "parallel.partition",
            f"{partition} has {partition.stages} stages, but parallel.pipeline x parallel.virtual is {stages}",
            f"give {stages} numbers, or set parallel.pipeline to {partition.stages}",
        )
    if partition is not None and partition.total != model.layers:
        raise contradiction(
            "parallel.partition",
            f"{partition} holds {partition.total} layers, but model.layers is {model.layers}",
            f"make the numbers sum to {model.layers}, or remove the key to balance the layers by cost",
        )
    if parallel.virtual > 1 and parallel.schedule not in ("interleaved", "zero-bubble"):
        raise contradiction(
            "parallel.virtual",
            f"{parallel.schedule} runs one stage per rank, not {parallel.virtual}",
            'set parallel.schedule to "interleaved" or "zero-bubble", or parallel.virtual to 1',
        )
    if parallel.schedule == "zero-bubble" and parallel.pipeline > 1:
        if parallel.zero == 3:
            raise contradiction(
                "parallel.zero",
                "zero-bubble computes weight gradients later, when ZeRO 3 has already resharded the weights",
                "use zero 2 or less, or another schedule",
            )
        if train.compile:
            raise contradiction(
                "train.compile",
                "zero-bubble splits the backward pass in two, and a compiled layer would run all of it twice",
                "remove train.compile, or use another schedule",
            )


def tensor(model: ModelConfig, parallel: ParallelSection, sequence_length: int) -> None:
    """Heads, widths and sequences are divisible by the ranks that share them."""
    tensor_ranks = f"{parallel.tensor} ranks"
    shares = [
        ("parallel.tensor", tensor_ranks, name, size, parallel.tensor)
        for name, size in (
            ("model.heads", model.heads),
            ("model.kv_heads", min(layer.attention.kv_heads for layer in model.blocks.layers)),
            *(
                ("model.ffn" if width == model.ffn else "the width of an expert", width)
                for width in sorted(mlp_widths(model))
            ),
            ("the padded vocabulary", model.padded_vocab),
        )
    ]
    if parallel.context > 1:
        chunks = 2 * parallel.context
        what = f"{chunks} chunks, two for each of {parallel.context} ranks,"
        shares.append(("parallel.context", what, "data.sequence_length", sequence_length, chunks))
    if parallel.sequence_parallel:
        ranks = parallel.tensor * parallel.context
        shares.append(("parallel.sequence_parallel", f"{ranks} ranks", "data.sequence_length", sequence_length, ranks))
    for key, who, name, size, parts in shares:
        if size % parts:
            raise contradiction(key, f"{who} do not divide {name} = {size}", f"choose a divisor of {size}")
    if parallel.context > 1 and model.attention_dropout:
        raise contradiction(
            "model.attention_dropout", "is not available with context parallelism", "set parallel.context to 1"
        )


def experts(model: ModelConfig, parallel: ParallelSection) -> None:
    """Experts are divisible by the ranks that share them, and dropped within whole sequences."""
    layers = [layer.mlp for layer in model.blocks.layers if isinstance(layer.mlp, ExpertsBlock)]
    if parallel.expert > 1 and not layers:
        raise contradiction("parallel.expert", f"{model.family} has no experts", "set parallel.expert to 1")
    for layer in layers[:1]:
        if layer.routing.experts % parallel.expert:
            raise contradiction(
                "parallel.expert",
                f"{parallel.expert} ranks do not divide model.experts = {layer.routing.experts}",
                f"choose a divisor of {layer.routing.experts}",
            )
        if layer.routing.capacity is not None and parallel.context > 1:
            raise contradiction(
                "model.capacity", "is counted over whole sequences, which context parallelism splits",
                "set parallel.context to 1, or remove model.capacity",
            )  # fmt: skip
    ranks = parallel.data and parallel.data * parallel.context // (parallel.replicate if parallel.zero else 1)
    if ranks and ranks % parallel.expert:
        raise contradiction(
            "parallel.expert",
            f"{parallel.expert} does not divide data x context / replicate = {ranks}",
            f"choose a divisor of {ranks}",
        )


def mlp_widths(model: ModelConfig) -> set[int]:
    """The widths of all MLPs and experts."""
    widths = {layer.mlp.ffn for layer in model.blocks.layers}
    shared = {layer.mlp.shared_ffn for layer in model.blocks.layers if isinstance(layer.mlp, ExpertsBlock)}
    return widths | {width for width in shared if width is not None}


def batch(train: TrainSection, parallel: ParallelSection) -> None:
    """Batches are multiples of the micro-batches of all data-parallel ranks; hybrid sharding divides those ranks."""
    per_step = train.micro_batch * (parallel.data or 1)
    sizes = {"train.global_batch": train.global_batch}
    if train.batch_ramp is not None:
        sizes |= {
            "train.batch_ramp.start": train.batch_ramp.start,
            "train.batch_ramp.increment": train.batch_ramp.increment,
        }
    for key, size in sizes.items():
        if size % per_step:
            raise contradiction(
                key,
                f"{size} is not a multiple of train.micro_batch x parallel.data = {per_step}",
                f"choose a multiple of {per_step}",
            )
    if parallel.replicate > 1 and (parallel.zero == 0 or (parallel.data or 0) % parallel.replicate):
        raise contradiction(
            "parallel.replicate",
            f"{parallel.replicate} replicas need parallel.zero > 0 and parallel.data as a multiple of them",
            "set parallel.zero to 1, 2 or 3 and parallel.data to a multiple of parallel.replicate",
        )


def gradients(
    optim: OptimSection, train: TrainSection, finetune: FinetuneSection | None, sparsity: SparsitySection | None
) -> None:
    """bf16 gradients are those of weights that compute in bf16."""
    if optim.gradients == "fp32":
        return
    hint = 'set optim.gradients = "fp32"'
    if train.precision not in ("bf16", "fp8"):
        raise contradiction(
            "optim.gradients", f'"bf16" is less precise than train.precision = "{train.precision}"', hint
        )  # fmt: skip
    if sparsity is not None and sparsity.method == "learned":
        raise contradiction("optim.gradients", "masks are learned in fp32", hint)
    if finetune is not None and finetune.adapter is not None:
        raise contradiction("optim.gradients", "adapters are trained in fp32", hint)


def sequence(model: ModelConfig, sequence_length: int) -> None:
    """The position table is at least as long as the sequences."""
    positions = model.blocks.positions
    if positions is not None and sequence_length > positions:
        raise contradiction(
            "data.sequence_length",
            f"{sequence_length} is longer than model.positions = {positions}",
            "decrease data.sequence_length or increase model.positions",
        )


def experts_finetune(model: ModelConfig, finetune: FinetuneSection) -> None:
    """Experts support LoRA, on a base that is not quantized."""
    has_experts = model.blocks.has_experts
    if has_experts and finetune.base_precision is not None:
        raise contradiction(
            "finetune.base_precision",
            "is not available for models with experts",
            "remove it: experts take LoRA in bf16",
        )
    if finetune.adapter is None or not finetune.adapter.has_experts:
        return
    if not has_experts:
        raise contradiction(
            "finetune.adapter.targets", f"{model.family} has no experts", 'remove the targets with "experts"'
        )
    if finetune.adapter.kind == "dora":
        raise contradiction(
            "finetune.adapter.kind", "DoRA is not available for experts",
            'use "lora", or remove "experts" from finetune.adapter.targets',
        )  # fmt: skip


def experts_sparsity(model: ModelConfig, sparsity: SparsitySection) -> None:
    """Masks of experts are fixed or learned, without distillation."""
    if not model.blocks.has_experts:
        return
    names = [f"layers.{n}.{name}" for n, name, param in model.blocks.layer_params() if param.is_expert]
    if sparsity.method in ("sr-ste", "joint") and any(sparsity.selects(name) for name in names):
        raise contradiction(
            "sparsity.method", f'"{sparsity.method}" does not support experts',
            'set sparsity.exclude = ["experts"], or prune experts with steelyard prune',
        )  # fmt: skip
    if sparsity.distill:
        raise contradiction("sparsity.distill", "is not available for models with experts", "set sparsity.distill to 0")


def base_precision(
    model: ModelConfig, finetune: FinetuneSection, parallel: ParallelSection, train: TrainSection
) -> None:
    """Quantized matrices are frozen below an adapter, and two 4-bit weights of a row share a byte on every rank."""
    key = "finetune.base_precision"
    if finetune.double_quant and finetune.base_precision != "nf4":
        raise contradiction(
            "finetune.double_quant", "needs the blocks of nf4", 'set finetune.base_precision to "nf4", or remove it'
        )
    if finetune.base_precision is None:
        return
    if finetune.adapter is None:
        raise contradiction(key, "quantized weights cannot be trained", "add [finetune.adapter], or remove the key")
    if train.precision == "fp8":
        raise contradiction("train.precision", "quantized matrices do not support fp8 products", 'use "bf16"')
    inner = model.blocks.layers[0].attention.query_width
    widths = {"model.hidden": model.hidden, "the heads' width": inner // parallel.tensor}
    for name, width in (widths | {"model.ffn": model.ffn // parallel.tensor}).items():
        if finetune.base_precision == "nf4" and width % 2:
            raise contradiction(key, f"nf4 stores pairs of weights, but {name} on a rank is {width}", 'use "int8"')


def sparsity(model: ModelConfig, sparsity: SparsitySection, parallel: ParallelSection, train: TrainSection) -> None:
    """Groups of weights divide the inputs of every matrix on every rank, and the method has its initial weights."""
    _, group = sparsity.kept_and_group
    inner = model.blocks.layers[0].attention.query_width
    # Tensor parallelism shards attention's output and the MLP's second projection along their inputs.
    widths = [("model.hidden", model.hidden, 1), ("the heads' width", inner, parallel.tensor)]
    for mlp_width in sorted(mlp_widths(model)):
        widths.append(("model.ffn" if mlp_width == model.ffn else "the width of an expert", mlp_width, parallel.tensor))
    for name, width, ranks in widths:
        if width % (group * ranks):
            among = f" on each of {ranks} ranks" if ranks > 1 else ""
            raise contradiction(
                "sparsity.pattern" if width % group else "parallel.tensor",
                f"groups of {group} do not divide {name} = {width}{among}",
                f"{name} must be a multiple of {group * ranks}",
            )
    if sparsity.method == "learned" and train.init_from is None and sparsity.base is None:
        raise contradiction(
            "sparsity.base",
            "mask learning needs existing weights",
            "set sparsity.base or train.init_from",
        )
    if sparsity.method == "joint" and train.init_from is None:
        raise contradiction(
            "train.init_from", "joint training starts from dense weights", "set train.init_from to the dense weights"
        )
    if sparsity.method == "fixed" and train.init_from is None:
        raise contradiction(
            "train.init_from", "fixed masks need pruned weights", "set train.init_from to the pruned weights"
        )
    if train.precision == "fp8":
        raise contradiction("train.precision", "masked matrices do not support fp8", 'use "bf16"')
