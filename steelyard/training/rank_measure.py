"""Measures one rank of any layout on the local device, for `steelyard plan measure`.

The rank's stages, shards and batch are those of a run: `Engine` builds them on a mesh of fake process groups
(`parallel/fake_group.py`) and runs its own steps, pipeline schedules included. What the rank would receive has finite
values, and the time to fill it is subtracted. So the result is compute time by phase and peak memory, without
communication; `NOT_MEASURED` lists what is missing.
"""

from __future__ import annotations

import gc
import os
import platform
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import steelyard
from steelyard import model as models
from steelyard.core.console import ProgressBar, console
from steelyard.core.errors import RuntimeFailure, UserError
from steelyard.core.recipe import Recipe
from steelyard.core.recipe.log_section import LogSection
from steelyard.core.run import now
from steelyard.parallel import mesh as meshes
from steelyard.parallel.fake_group import Received, fake_world
from steelyard.parallel.mesh import Mesh
from steelyard.sizes.gpu_catalogue import by_device_name
from steelyard.sizes.least_recompute import with_least_recompute
from steelyard.sizes.memory import memory_of
from steelyard.sizes.param_count import expert_keys
from steelyard.sizes.rank_check import data_ranks
from steelyard.sizes.stage_layers import partition_of
from steelyard.tokens.dataloader import Rows, columns
from steelyard.training import device as devices
from steelyard.training.engine import Engine
from steelyard.training.extension import Extension
from steelyard.training.profiler import Profiler
from steelyard.training.tensor_peak import cpu_peak, held_bytes

WARM_UP, STEPS = 3, 5
PHASES = {
    "forward": ("forward",),
    "backward": ("backward", "weights"),
    "gradients": ("gradients", "reduce"),
    "optimizer": ("optimizer", "update"),
}
NOT_MEASURED = [
    "communication: collectives and sends take no time, so neither their time nor its overlap with compute is included",
    "NCCL's buffers and the CUDA context, which are not memory of tensors",
    "contention: other ranks that share the links, the host's memory and its cores, or the GPU's power",
    "the wait for slower ranks and the pipeline's bubble",
]


class Settings(NamedTuple):
    """What is the same for all ranks of a measurement."""

    world: int
    steps: int
    imbalance: float
    traces: Path | None
    progress: ProgressBar


def measure(
    recipe: Recipe,
    world: int,
    ranks: Sequence[int] = (0,),
    steps: int = STEPS,
    imbalance: float = 1.0,
    traces: Path | None = None,
) -> dict[str, Any]:
    """Measure some ranks of a job of `world` ranks, in the format that `planning.measured_ranks` reads.

    With `traces`, one more step of each rank runs under torch's profiler, which writes its trace to this folder.
    """
    data = data_ranks(recipe, world)
    for rank in ranks:
        if not 0 <= rank < world:
            raise UserError(f"--ranks: there is no rank {rank} of {world}", hint=f"use ranks from 0 to {world - 1}")
    if recipe.finetune is not None or recipe.sparsity is not None:
        raise UserError("plan measure builds pretraining steps", hint="remove [finetune] and [sparsity]")
    device = devices.choose(recipe)
    recipe = with_least_recompute(recipe, world, devices.usable_memory(device))
    name = devices.name(device)
    known = by_device_name(name)
    parallel, model = recipe.parallel, recipe.model
    has_experts = model.blocks.has_experts
    each = WARM_UP + steps + (device.type != "cuda") + (traces is not None)
    with console.progress("measuring", each * len(ranks), "steps") as progress:
        settings = Settings(world, steps, imbalance, traces, progress)
        measured = [_rank(recipe, device, rank, settings) for rank in ranks]
    return {
        "format": 1,
        "recipe": recipe.name,
        "world": world,
        "gpu": known.name if known else name,
        "device": name,
        "precision": recipe.train.precision,
        "compiled": devices.compiles(recipe, device),
        "model": {
            "family": model.family, "layers": model.layers, "hidden": model.hidden, "heads": model.heads,
            "kv_heads": getattr(model, "kv_heads", model.heads), "ffn": model.ffn, "vocab": model.padded_vocab,
            **expert_keys(model), "sequence_length": recipe.data.sequence_length,
        },
        "layout": {
            "tensor": parallel.tensor, "context": parallel.context, "expert": parallel.expert,
            "pipeline": parallel.pipeline, "virtual": parallel.virtual, "data": data, "replicate": parallel.replicate,
            "zero": parallel.zero, "sequence_parallel": parallel.sequence_parallel, "schedule": parallel.schedule,
            "recompute": parallel.recompute, "partition": list(partition_of(recipe).counts),
            "micro_batch": recipe.train.micro_batch, "offload": recipe.optim.offload,
        },
        "micro_batches": recipe.train.global_batch // (recipe.train.micro_batch * data),
        "routing": _routing(recipe, imbalance) if has_experts else None,
        "expert_imbalance": imbalance,
        "steps": steps,
        "date": now(),
        "versions": {
            "steelyard": steelyard.__version__, "torch": str(torch.__version__), "python": platform.python_version(),
        },
        "host": {
            "machine": platform.machine(), "cores": os.cpu_count() or 1, "threads": torch.get_num_threads(),
            "operation_us": operation_us(device),
        },
        "ranks": measured,
        "not_measured": NOT_MEASURED,
    }  # fmt: skip


def _routing(recipe: Recipe, imbalance: float) -> str:
    own = "each token goes to the experts that the router chooses with random weights (expert_load: busiest over mean)"
    if recipe.parallel.expert == 1:
        return own
    received = f"a rank receives {imbalance:g} times as many slots as it sends, evenly from all ranks for its experts"
    return f"{own}; {received}"


def _rank(recipe: Recipe, device: torch.device, rank: int, settings: Settings) -> dict[str, Any]:
    """Build one rank, run its steps, and free it."""
    world = settings.world
    console.say(
        f"rank {rank} of {world}: building it on {devices.name(device)}, then {WARM_UP} + {settings.steps} steps"
    )
    _free(device)
    before = held_bytes(device)
    if world == 1:
        found = _steps(recipe, meshes.alone(), device, rank, settings, Received())
    else:
        with fake_world(rank, world, settings.imbalance) as received:
            found = _steps(recipe, meshes.make(recipe.parallel, device.type), device, rank, settings, received)
    _free(device)
    pipeline_rank = rank // (world // recipe.parallel.pipeline)
    predicted = memory_of(recipe, world, [pipeline_rank])[0]
    measured = found.pop("peak") - before
    return {
        "rank": rank,
        "pipeline_rank": pipeline_rank,
        **found,
        "peak_bytes": measured,
        "predicted_bytes": predicted.total,
        "predicted_bytes_by_kind": predicted.by_kind(),
        "memory_error": predicted.total / measured - 1 if measured > 0 else None,
    }


def operation_us(device: torch.device, operations: int = 200, rounds: int = 25) -> float:
    """Microseconds that the host takes for an operation on 16 elements that autograd records, the median of rounds."""
    ones = torch.ones(16, device=device, requires_grad=True)
    times = []
    for _ in range(rounds):
        if ones.is_cuda:
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        for _ in range(operations):
            ones * 2.0
        times.append((time.perf_counter() - began) / operations)
    return round(1e6 * median(times), 2)


def _free(device: torch.device) -> None:
    gc.collect()
    torch.compiler.reset()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _steps(
    recipe: Recipe, mesh: Mesh, device: torch.device, rank: int, settings: Settings, received: Received
) -> dict[str, Any]:
    """Seconds of each phase, peak memory and the routing of this rank's steps."""
    engine = Engine(recipe, mesh, device, Extension(), None)
    initialise(engine)
    timeline = engine.timeline
    received.span = lambda: timeline.open_span
    labels = recipe.train.global_batch * recipe.data.sequence_length
    batches = batches_of(recipe, mesh.data.size)
    found: list[dict[str, float]] = []
    reserved = None

    def step() -> tuple[Tensor, Tensor, Tensor]:
        done = engine.step(next(batches), 0, 1e-5, labels, 1.0)
        settings.progress.advance(1, f"rank {rank}")
        return done

    for number in range(WARM_UP + settings.steps):
        if number == WARM_UP and device.type == "cuda":  # Compilation and autotuning allocate more than a step does.
            torch.cuda.reset_peak_memory_stats(device)
        timeline.begin()
        received.is_timed = True
        loss, _, skipped = step()
        spans = timeline.spans(number)
        received.is_timed = False
        fills = received.seconds()
        if bool(skipped) or not bool(torch.isfinite(loss)):
            raise RuntimeFailure(f"step {number + 1} of the measurement is not finite", hint="this is a bug: report it")
        found.append(_phases(spans, fills))
    if device.type == "cuda":
        peak, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    else:
        peak = cpu_peak(step)
    if settings.traces is not None:
        log = LogSection(profile=[1, 1], profile_tool="torch")
        with Profiler(log, settings.traces, device, rank, timeline, nullcontext).around(1):
            step()
    seconds = {phase: median(step[phase] for step in found[WARM_UP:]) for phase in found[0]}
    load = engine.balance.metrics().get("expert_load")
    return {
        "layers": sum(len(stage.layers) for stage in engine.parallel_model.stages.values()),
        "stages": sorted(engine.parallel_model.stages),
        "parameters": sum(shard.tensor.numel() for shard in engine.param_shards),
        "seconds": {phase: seconds[phase] for phase in PHASES},
        "compute_seconds": sum(seconds[phase] for phase in PHASES),
        "step_seconds": seconds["step"],
        "fill_seconds": seconds["fill"],
        "expert_load": load,
        "reserved_bytes": reserved,
        "peak": peak,
    }


def _phases(spans: list[dict[str, Any]], fills: dict[int, float]) -> dict[str, float]:
    """Seconds of a step by phase, without the time in which received buffers were filled."""
    each = [(span["end_ns"] - span["start_ns"]) / 1e9 - fills.get(number, 0.0) for number, span in enumerate(spans)]
    seconds = {
        phase: sum(spent for spent, span in zip(each, spans, strict=True) if span["name"] in names)
        for phase, names in PHASES.items()
    }
    return seconds | {"step": sum(each), "fill": sum(fills.values())}


def initialise(engine: Engine) -> None:
    """Draw weights on the device: `Engine.initialise` draws them on the host, row by row, which takes longer."""
    config = engine.recipe.model
    generator = torch.Generator(engine.device).manual_seed(engine.recipe.train.seed)
    with torch.no_grad():
        for shard in engine.param_shards:
            if len(shard.shape) > 1:
                shard.tensor.normal_(std=config.init_std, generator=generator)
            elif shard.tensor.numel():
                rows = models.initial(shard.name, shard.rows, [], engine.recipe.train.seed, 0.02, config.layers)
                shard.tensor.copy_(rows)
    engine.optimizer.copy_weights_to_host()


def batches_of(recipe: Recipe, data: int) -> Iterator[Rows]:
    """This rank's rows of random tokens, the same ones in every step."""
    size = recipe.train.global_batch // data, recipe.data.sequence_length + 1
    rows = columns(np.random.RandomState(recipe.train.seed).randint(0, recipe.model.vocab, size))
    while True:
        yield rows
