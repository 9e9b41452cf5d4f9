"""Files of `steelyard plan measure`: the prediction beside them, and their use as evidence (`--measured FILE`).

The format is JSON, one object; `MeasuredRanks` has its keys, and `training/rank_measure.py` writes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any

from pydantic import ConfigDict, Field, NonNegativeFloat, PositiveFloat, ValidationError, model_validator

from steelyard.core import units
from steelyard.core.errors import UserError
from steelyard.core.recipe import Recipe
from steelyard.core.recipe.load import explained
from steelyard.core.recipe.section import Batch, Degree, NonNegativeInt, PositiveInt, Section, contradiction
from steelyard.core.safe_parse import read_json_object
from steelyard.planning.cluster import Cluster, Link, Nodes, OwnGpu
from steelyard.planning.evidence import Evidence, Factors, LayoutKey, WorkKey, layout_key, work_key
from steelyard.planning.layout import Layout, of_recipe
from steelyard.planning.predict import Predictor
from steelyard.planning.results import plan_of
from steelyard.sizes.memory import memory_of
from steelyard.sizes.param_count import expert_keys

FREE_GBPS = 1e9  # A link that costs nothing: a measured rank has no communication.
PHASES = ("forward", "backward", "optimizer")


class Phases(Section):
    """Seconds of compute per step. `gradients` is their norm; the prediction has it in the optimizer."""

    forward: NonNegativeFloat
    backward: NonNegativeFloat
    gradients: NonNegativeFloat = 0.0
    optimizer: NonNegativeFloat

    def by_phase(self) -> dict[str, float]:
        """Seconds of the phases that the planner predicts."""
        return {
            "forward": self.forward, "backward": self.backward, "optimizer": self.gradients + self.optimizer
        }  # fmt: skip


class MeasuredRank(Section):
    """One rank. Other keys of the file are for readers."""

    model_config = ConfigDict(extra="ignore")

    rank: NonNegativeInt
    pipeline_rank: NonNegativeInt
    seconds: Phases
    compute_seconds: PositiveFloat
    peak_bytes: PositiveInt


class MeasuredLayout(Section):
    """The layout: keys of `[parallel]`, and the micro-batch."""

    model_config = ConfigDict(extra="ignore")

    tensor: Degree
    context: Degree
    expert: Degree
    pipeline: Degree
    virtual: Degree
    data: Degree
    replicate: Degree = 1
    zero: Annotated[int, Field(ge=0, le=3)]
    sequence_parallel: bool
    schedule: str
    recompute: str | int
    partition: Annotated[list[NonNegativeInt], Field(min_length=1, max_length=10_000)]
    micro_batch: Batch

    def parallel(self) -> dict[str, Any]:
        """The keys of a recipe's `[parallel]`."""
        return self.model_dump(exclude={"micro_batch"}) | {"partition": "-".join(map(str, self.partition))}


class MeasuredHost(Section):
    """The host that launched the kernels; files from before 2026-11-19 do not have its speed."""

    model_config = ConfigDict(extra="ignore")

    operation_us: PositiveFloat | None = None


class MeasuredRanks(Section):
    """A file."""

    model_config = ConfigDict(extra="ignore")

    world: Degree
    gpu: str
    precision: str
    model: dict[str, Any]
    layout: MeasuredLayout
    micro_batches: Batch
    expert_imbalance: Annotated[float, Field(ge=1)] = 1.0
    host: MeasuredHost = MeasuredHost()
    ranks: Annotated[list[MeasuredRank], Field(min_length=1)]

    @model_validator(mode="after")
    def _check(self) -> MeasuredRanks:
        of = self.layout
        if self.world != of.tensor * of.context * of.pipeline * of.data:
            raise contradiction("world", f"{self.world} is not the product of the layout's degrees", "measure again")
        if any(rank.rank >= self.world or rank.pipeline_rank >= of.pipeline for rank in self.ranks):
            raise contradiction("ranks", "a rank is not one of the layout", "measure again")
        return self


def load(path: Path) -> MeasuredRanks:
    """Read and validate a file of `steelyard plan measure`."""
    values = read_json_object(path)
    try:
        return MeasuredRanks.model_validate(values)
    except ValidationError as error:
        raise explained(error, values, {}, str(path), MeasuredRanks) from None


def identity(recipe: Recipe) -> dict[str, Any]:
    """The keys of a model that its measured work depends on."""
    model = recipe.model
    return {
        "family": model.family, "layers": model.layers, "hidden": model.hidden, "heads": model.heads,
        "kv_heads": getattr(model, "kv_heads", model.heads), "ffn": model.ffn, "vocab": model.padded_vocab,
        **expert_keys(model), "sequence_length": recipe.data.sequence_length,
    }  # fmt: skip


def refuse_another(measured: MeasuredRanks, recipe: Recipe, path: Path, cluster: Cluster | None = None) -> None:
    """Raise `UserError` if another model, length or precision was measured, or a GPU that is not in the cluster."""
    names = sorted({gpu.name for gpu in cluster.gpu_by_type.values()}) if cluster else [measured.gpu]
    if measured.gpu not in names:
        raise UserError(
            f"this was measured on {measured.gpu}, but the cluster has {', '.join(names)}", where=str(path),
            hint="omit it, or set gpu in the file to the name of this device in the cluster file",
        )  # fmt: skip
    mine = identity(recipe) | {"precision": recipe.train.precision}
    theirs = measured.model | {"precision": measured.precision}
    for key, value in mine.items():
        if theirs.get(key) != value:
            raise UserError(
                f"this measurement has {key} {theirs.get(key)}, but the recipe has {value}",
                where=str(path),
                hint="measure again with steelyard plan measure RECIPE",
            )
    try:
        _applied(recipe, measured)
    except ValidationError as error:
        first = error.errors()[0]["msg"]
        raise UserError(f"the recipe cannot have the measured layout: {first}", where=str(path)) from None


def free_cluster(gpu: str, world: int, own: Sequence[OwnGpu] = (), host_operation_us: float | None = None) -> Cluster:
    """`world` GPUs of one kind whose links cost nothing; `own` describes GPUs that the catalogue does not have."""
    nodes = Nodes(type="node", count=1, gpu=gpu, gpus=1, intra_GBps=FREE_GBPS, intra_latency_us=0.0)
    link = Link(between=["*", "*"], GBps=FREE_GBPS, latency_us=0.0)
    update = {"count": world, "host_operation_us": host_operation_us}
    return Cluster(nodes=[nodes.model_copy(update=update)], links=[link], gpus=list(own))


def with_world(recipe: Recipe, world: int) -> Recipe:
    """The recipe with the data-parallel degree that it has on `world` ranks, on nodes of `free_cluster`."""
    data = recipe.parallel.data_for(world)
    parallel = recipe.parallel.model_copy(update={"data": data, "placement": []})
    return recipe.model_copy(update={"parallel": parallel})


def predicted_phases(recipe: Recipe, cluster: Cluster, pipeline_rank: int, imbalance: float) -> dict[str, float]:
    """Predicted seconds of compute of one pipeline rank by phase, on a `free_cluster`."""
    recipe = with_world(recipe, cluster.ranks)
    layout = of_recipe(recipe, cluster)
    return phases_of(Predictor.of_layout(recipe, cluster, layout, imbalance=imbalance), layout, pipeline_rank)


def phases_of(predictor: Predictor, layout: Layout, rank: int) -> dict[str, float]:
    """Seconds of a pipeline rank's passes per step, and of its optimizer update."""
    step = predictor.step(layout)
    times, table = step.times(layout.partition), step.table
    stages = range(rank, len(layout.partition), layout.pipeline)
    layers = sum(layout.partition[stage] for stage in stages)
    unit = table.stages[rank].layer
    shared = layers * (unit.exchange + unit.expert) / 2
    return {
        "forward": table.micro_batches * (sum(times.forward[stage] for stage in stages) - shared),
        "backward": table.micro_batches
        * (sum(times.backward[stage] + times.weights[stage] for stage in stages) - shared),
        "optimizer": step.after(layout.partition, times, rank)[1],
    }


def with_prediction(result: dict[str, Any], recipe: Recipe) -> dict[str, Any]:
    """The result of a measurement with predicted seconds beside the measured ones."""
    ranks, operation = [], result["host"]["operation_us"]
    machines = free_cluster(result["gpu"], result["world"], host_operation_us=operation)
    own = with_world(recipe, machines.ranks)
    layout = of_recipe(own, machines)
    predictor = Predictor.of_layout(own, machines, layout, imbalance=result["expert_imbalance"])
    step = plan_of(predictor, layout)
    for rank in result["ranks"]:
        predicted = phases_of(predictor, layout, rank["pipeline_rank"])
        total = sum(predicted.values())
        range_ = step.range.scaled(total / step.seconds)
        ranks.append(rank | {
            "predicted_seconds": predicted, "predicted_compute_seconds": total,
            "predicted_compute_low": range_.low, "predicted_compute_high": range_.high,
            "inside_range": range_.contains(rank["compute_seconds"]),
            "compute_error": total / rank["compute_seconds"] - 1,
        })  # fmt: skip
    return result | {"ranks": ranks}


def with_measured_hosts(files: list[MeasuredRanks], cluster: Cluster) -> Cluster:
    """The cluster with the hosts that launched the measured steps, where its file does not give their speed."""
    speeds: dict[str, list[float]] = {}
    for measured in files:
        if measured.host.operation_us is not None:
            speeds.setdefault(measured.gpu, []).append(measured.host.operation_us)
    found = []
    for nodes in cluster.nodes:
        known = speeds.get(cluster.gpu_of(nodes).name) if nodes.host_operation_us is None else None
        found.append(nodes.model_copy(update={"host_operation_us": median(known)}) if known else nodes)
    return cluster.with_nodes(found)


def evidence_of(files: list[MeasuredRanks], recipe: Recipe, cluster: Cluster) -> Evidence:
    """The evidence of measured ranks: factors of their work, over all ranks with the same work, and their memory."""
    sums: dict[WorkKey, list[dict[str, float]]] = {}
    peaks: dict[tuple[LayoutKey, int], int] = {}
    for measured in files:
        applied = _applied(recipe, measured)
        machines = free_cluster(measured.gpu, measured.world, cluster.gpus, measured.host.operation_us)
        layout = of_recipe(applied, machines)
        for rank in measured.ranks:
            predicted = predicted_phases(applied, machines, rank.pipeline_rank, measured.expert_imbalance)
            both = sums.setdefault(work_key(layout, measured.gpu), [dict.fromkeys(PHASES, 0.0) for _ in range(2)])
            for phase in PHASES:
                both[0][phase] += rank.seconds.by_phase()[phase]
                both[1][phase] += predicted[phase]
            key = layout_key(layout), rank.pipeline_rank
            peaks[key] = max(peaks.get(key, 0), rank.peak_bytes)
    work = {
        key: Factors(*(seconds[phase] / predicted[phase] if predicted[phase] else 1.0 for phase in PHASES))
        for key, (seconds, predicted) in sums.items()
    }
    return Evidence(work=work, peaks=peaks)


def _applied(recipe: Recipe, measured: MeasuredRanks) -> Recipe:
    """The recipe with the layout and batch that were measured."""
    settings, layout = recipe.settings(), measured.layout
    settings["parallel"] = layout.parallel()
    settings["train"] |= {
        "micro_batch": layout.micro_batch, "global_batch": measured.micro_batches * layout.micro_batch * layout.data
    }  # fmt: skip
    settings["train"].pop("batch_ramp", None)
    return Recipe.model_validate(settings)


def memory_check(path: Path, recipe: Recipe, world: int) -> list[dict[str, Any]]:
    """Predicted and measured memory of the measured ranks of this layout, for `steelyard train --dry-run`."""
    measured = load(path)
    refuse_another(measured, recipe, path)
    own = with_world(recipe, world)
    mine = layout_key(of_recipe(own, free_cluster(measured.gpu, world)))
    theirs = layout_key(of_recipe(_applied(recipe, measured), free_cluster(measured.gpu, measured.world)))
    if mine != theirs or world != measured.world:
        raise UserError(
            f"this measurement is of another layout on {measured.world} ranks", where=str(path),
            hint="measure again with steelyard plan measure RECIPE --world N",
        )  # fmt: skip
    rows = []
    for rank in measured.ranks:
        predicted = memory_of(recipe, world, [rank.pipeline_rank])[0].total
        rows.append({
            "rank": rank.rank, "pipeline_rank": rank.pipeline_rank, "predicted_bytes": predicted,
            "measured_bytes": rank.peak_bytes, "error": predicted / rank.peak_bytes - 1,
        })  # fmt: skip
    return rows


def memory_text(rows: list[dict[str, Any]]) -> str:
    """The comparison of memory as a table."""
    from steelyard.planning.plan_report import table

    cells = [["measured rank", "predicted", "measured", "error"]]
    for row in rows:
        sizes = row["predicted_bytes"], row["measured_bytes"]
        cells.append([f"{row['rank']}, pipeline rank {row['pipeline_rank']}", *map(units.size, sizes), _error(*sizes)])
    return table(cells)


def as_text(result: dict[str, Any]) -> str:
    """The measurement as tables."""
    from steelyard.planning.plan_report import table

    layout = result["layout"]
    degrees = ", ".join(
        f"{key} {layout[key]}"
        for key in ("tensor", "context", "expert", "pipeline", "data", "zero")
        if layout[key] != 1
    )
    lines = [
        f"{result['recipe']} on {result['world']} ranks ({degrees or 'one rank'}), {result['precision']}, "
        f"{result['micro_batches']} micro-batches of {layout['micro_batch']}; measured on {result['device']}, "
        f"whose host takes {result['host']['operation_us']:g} us for a small operation (host_operation_us)"
    ]
    for rank in result["ranks"]:
        rows = [[f"rank {rank['rank']}, pipeline rank {rank['pipeline_rank']}", "predicted", "measured", "error"]]
        predicted, seconds = rank["predicted_seconds"], Phases(**rank["seconds"]).by_phase()
        rows += [[phase, _ms(predicted[phase]), _ms(seconds[phase]), _error(predicted[phase], seconds[phase])]
                 for phase in PHASES]  # fmt: skip
        total = rank["predicted_compute_seconds"], rank["compute_seconds"]
        rows.append(["compute of a step", *map(_ms, total), _error(*total)])
        memory = rank["predicted_bytes"], rank["peak_bytes"]
        rows.append(["peak memory", *map(units.size, memory), _error(*memory)])
        low, high = (_ms(rank[f"predicted_compute_{end}"]) for end in ("low", "high"))
        where = "inside" if rank["inside_range"] else "outside"
        lines += [table(rows), f"the measured compute is {where} the 80% range of the prediction, {low} to {high}"]
    if result["routing"]:
        lines.append(f"routing: {result['routing']}")
    lines.append("not measured:\n" + "\n".join(f"- {each}" for each in result["not_measured"]))
    return "\n\n".join(lines)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"


def _error(predicted: float, measured: float) -> str:
    return f"{100 * (predicted / measured - 1):+.1f}%" if measured > 0 else ""
