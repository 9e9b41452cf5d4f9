"""Predicts the parameters and memory of a recipe without a GPU, data or weights.

The model is built from meta tensors, which have shapes and no storage, so the counted parameters are those that would
be trained. `sizes.memory` predicts the memory of each rank.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch

from steelyard import model
from steelyard.core import units
from steelyard.core.errors import RuntimeFailure, UserError
from steelyard.core.recipe import Recipe
from steelyard.core.recipe.parallel_section import Partition
from steelyard.model import StageSpec
from steelyard.sizes.gpu_catalogue import CATALOGUE, GIB, by_name
from steelyard.sizes.least_recompute import with_least_recompute
from steelyard.sizes.memory import RESERVED, Memory, memory_of, micro_batches
from steelyard.sizes.memory_hints import remedies
from steelyard.sizes.param_count import described, parameters
from steelyard.sizes.stage_layers import partition_of, stage_parameters


@dataclass(frozen=True)
class StageParams:
    """One pipeline stage: its layers, and its parameters in total and on each tensor and expert rank."""

    number: int
    pipeline_rank: int
    layers: range
    parameters: int
    active: int
    """Parameters that compute one token."""
    parameters_per_rank: int


@dataclass(frozen=True)
class DeviceMemory:
    """The memory of a device, with a name to display."""

    name: str
    memory: int

    @property
    def usable(self) -> int:
        """Bytes available for tensors."""
        return self.memory - RESERVED


@dataclass(frozen=True)
class DryRun:
    """The predicted run. `memory` has one entry per pipeline rank; `device` is None if it is not known."""

    recipe: Recipe
    world: int
    stages: list[StageParams]
    memory: list[Memory]
    device: DeviceMemory | None

    @property
    def too_full(self) -> list[int]:
        """The pipeline ranks that do not fit."""
        if self.device is None:
            return []
        return [rank for rank, memory in enumerate(self.memory) if memory.total > self.device.usable]


def dry_run(recipe: Recipe, world: int | None = None, gpu: str | None = None) -> DryRun:
    """Build the recipe's model without weights and predict each rank's memory with `world` ranks."""
    world = recipe.parallel.least_world if world is None else world
    device = device_of(recipe, gpu)
    recipe = with_least_recompute(recipe, world, None if device is None else device.usable)
    memory = memory_of(recipe, world)
    partition = partition_of(recipe)
    stages = [_stage(recipe, partition, number) for number in range(recipe.parallel.stages)]
    return DryRun(recipe, world, stages, memory, device)


def device_of(recipe: Recipe, gpu: str | None) -> DeviceMemory | None:
    """The device of `--gpu`, a catalogue name or an amount of memory (`80`, `24GiB`); by default the local GPU."""
    if gpu is None:
        if recipe.train.device == "cpu" or not torch.cuda.is_available():
            return None
        properties = torch.cuda.get_device_properties(0)
        return DeviceMemory(properties.name, properties.total_memory)
    known = by_name(gpu)
    if known is not None and known.memory is not None:
        return DeviceMemory(known.name, known.memory)
    amount = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(GiB|GB|G)?", gpu, re.IGNORECASE)
    if amount is None:
        names = ", ".join(entry.name for entry in CATALOGUE if entry.memory is not None)
        raise UserError(f"--gpu: unknown GPU {gpu}", hint=f"give its memory, like 80GiB, or one of {names}")
    unit = 10**9 if (amount[2] or "").upper() == "GB" else GIB
    return DeviceMemory(f"{gpu} of memory", int(float(amount[1]) * unit))


def refuse_what_does_not_fit(plan: DryRun) -> None:
    """Raise if a rank would run out of memory, with its stages and with settings that reduce memory."""
    if not plan.too_full or plan.device is None:
        return
    worst = max(plan.too_full, key=lambda rank: plan.memory[rank].total)
    memory = plan.memory[worst]
    stages = ", ".join(str(stage.number) for stage in plan.stages if stage.pipeline_rank == worst)
    largest = sorted(memory.by_kind().items(), key=lambda item: -item[1])[:2]
    helpful = remedies(plan.recipe, plan.world, plan.device.usable)
    tried = "; ".join(f"{change} would need {units.size(size)}" for change, size in helpful)
    raise RuntimeFailure(
        f"stage {stages} needs {units.size(memory.total)} on each rank, but {plan.device.name} has "
        f"{units.size(plan.device.usable)} for tensors; the largest parts are "
        + " and ".join(f"{kind.replace('_', ' ')} ({units.size(size)})" for kind, size in largest),
        hint=tried or "spread the model over more ranks: parallel.tensor, parallel.pipeline, --world",
    )


def _stage(recipe: Recipe, partition: Partition, number: int) -> StageParams:
    """The parameters of a stage. One layer of each kind is built: most are equal, and there may be thousands."""
    layers, blocks = partition.layers_of(number), recipe.model.blocks.layers
    alike = Counter(blocks[layer] for layer in layers)
    first = {blocks[layer]: layer for layer in reversed(layers)}
    with torch.device("meta"):
        spec = StageSpec(range(0), number == 0, number == recipe.parallel.stages - 1)
        counted = _size(model.build(recipe.model, spec))
        for block, layer in first.items():
            built = model.build(recipe.model, StageSpec(range(layer, layer + 1), False, False))
            counted += alike[block] * _size(built.layers)
    expected = stage_parameters(recipe, number)
    if counted != expected.total:
        raise AssertionError(f"stage {number} has {counted} parameters, but steelyard.sizes counts {expected.total}")
    parallel = recipe.parallel
    return StageParams(
        number=number,
        pipeline_rank=number % parallel.pipeline,
        layers=layers,
        parameters=counted,
        active=expected.active,
        parameters_per_rank=stage_parameters(recipe, number, parallel.tensor, parallel.expert).total,
    )


def _size(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def as_result(plan: DryRun) -> dict[str, Any]:
    """The plan as one JSON object."""
    parallel, tune = plan.recipe.parallel, plan.recipe.finetune
    return {
        "recipe": plan.recipe.name,
        "world": plan.world,
        "data": plan.world // parallel.model_ranks,
        "micro_batches": micro_batches(plan.recipe, plan.world),
        "parameters": parameters(plan.recipe.model).total,
        "active_parameters": parameters(plan.recipe.model).active,
        "partition": str(partition_of(plan.recipe)),
        "adapter": None if tune is None or tune.adapter is None else tune.adapter.model_dump(),
        "base_precision": None if tune is None else tune.base_precision,
        "stages": [
            {
                "stage": stage.number,
                "pipeline_rank": stage.pipeline_rank,
                "layers": len(stage.layers),
                "parameters": stage.parameters,
                "active_parameters": stage.active,
                "parameters_per_rank": stage.parameters_per_rank,
            }
            for stage in plan.stages
        ],
        "ranks": [
            {
                "pipeline_rank": rank,
                "bytes": memory.by_kind(),
                "total_bytes": memory.total,
                "host_bytes": memory.host,
                "memory_checkpoint_bytes": memory.memory_copies,
                "fits": None if plan.device is None else rank not in plan.too_full,
            }
            for rank, memory in enumerate(plan.memory)
        ],
        "device": None if plan.device is None else {"name": plan.device.name, "usable_bytes": plan.device.usable},
        "fits": None if plan.device is None else not plan.too_full,
    }


def as_text(plan: DryRun) -> str:
    """The plan as text tables: stages and their parameters, then the memory of a rank by kind."""
    has_experts = plan.recipe.model.blocks.has_experts
    stages = [["stage", "pipeline rank", "layers", "parameters", *(["active"] if has_experts else []), "on each rank"]]
    for stage in plan.stages:
        layers = f"{stage.layers[0]}-{stage.layers[-1]}" if stage.layers else "none"
        sizes = [stage.parameters, *([stage.active] if has_experts else []), stage.parameters_per_rank]
        stages.append([str(stage.number), str(stage.pipeline_rank), layers, *map(units.count, sizes)])
    kinds = [["memory of a rank", *(f"pipeline rank {rank}" for rank in range(len(plan.memory)))]]
    for kind in plan.memory[0].by_kind():
        kinds.append([kind.replace("_", " "), *(units.size(memory.by_kind()[kind]) for memory in plan.memory)])
    kinds.append(["total", *(units.size(memory.total) for memory in plan.memory)])
    if any(memory.host for memory in plan.memory):
        kinds.append(["(in host memory)", *(units.size(memory.host) for memory in plan.memory)])
    if any(memory.memory_copies for memory in plan.memory):
        kinds.append(["(of these, memory checkpoints)", *(units.size(memory.memory_copies) for memory in plan.memory)])
    return "\n\n".join([_heading(plan), _table(stages), _table(kinds), _verdict(plan)])


def _heading(plan: DryRun) -> str:
    parallel, train = plan.recipe.parallel, plan.recipe.train
    mesh = {"tensor": parallel.tensor, "context": parallel.context, "pipeline": parallel.pipeline}
    mesh |= {"data": plan.world // parallel.model_ranks, "expert": parallel.expert}
    experts = f", {described(plan.recipe.model)} parameters" if plan.recipe.model.blocks.has_experts else ""
    axes = " x ".join(f"{axis} {size}" for axis, size in mesh.items() if size > 1) or "no parallelism"
    return (
        f"{plan.recipe.name}{experts} on {plan.world} rank{'s' if plan.world > 1 else ''}: {axes}, "
        f"zero {parallel.zero}, {train.precision}, {micro_batches(plan.recipe, plan.world)} micro-batches of "
        f"{train.micro_batch} x {plan.recipe.data.sequence_length} tokens, recompute {parallel.recompute}"
        + _adapter(plan.recipe)
    )


def _adapter(recipe: Recipe) -> str:
    """The adapter and the precision of its base, as text for the heading."""
    tune = recipe.finetune
    if tune is None or tune.adapter is None:
        return ""
    precision = (tune.base_precision or recipe.train.precision) + (", double_quant" if tune.double_quant else "")
    return f"; {tune.adapter.kind} of rank {tune.adapter.rank}, frozen matrices in {precision}"


def _verdict(plan: DryRun) -> str:
    most = units.size(max(memory.total for memory in plan.memory))
    if plan.device is None:
        return f"needs {most} on the fullest rank for tensors, plus about {units.size(RESERVED)} reserved"
    answer = "does not fit" if plan.too_full else "fits"
    return f"{answer}: {most} on the fullest rank, {plan.device.name} has {units.size(plan.device.usable)} for tensors"


def _table(rows: list[list[str]]) -> str:
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
