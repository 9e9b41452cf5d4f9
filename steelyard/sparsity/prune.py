"""One-shot pruning of a checkpoint: validates the request, then prunes layer by layer while writing the output.

The complete output appears by rename. A killed command leaves its finished layers (`finished_layers`), and the same
command continues after them. All ranks prune (`prune_ranks`); rank 0 writes.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Generator, Iterator
from contextlib import closing
from typing import Any

import torch
from torch import Tensor

from steelyard.checkpoint.formats import CheckpointSource, open_source
from steelyard.checkpoint.formats.source import check
from steelyard.checkpoint.formats.write import Target, convert, refuse_destination
from steelyard.core import units
from steelyard.core.console import ProgressBar, console
from steelyard.core.errors import UserError
from steelyard.core.recipe.parallel_section import ParallelSection
from steelyard.parallel import mesh as meshes
from steelyard.parallel.mesh import Mesh
from steelyard.parallel.world import World, detect, init_distributed, raise_on_all_ranks, run_on_rank0
from steelyard.sparsity import frozen_base, mask_file
from steelyard.sparsity.calibration import Calibration, Windows, windows_of
from steelyard.sparsity.finished_layers import FinishedLayers
from steelyard.sparsity.layerwise import LayerOnDevice, Task, batches_of, pruned_layers
from steelyard.sparsity.patterns import Pattern
from steelyard.sparsity.prune_request import PruneRequest, method_and_update
from steelyard.sparsity.pruned_source import PartlyPrunedSource
from steelyard.sparsity.target_modules import chosen, maskable
from steelyard.training.device import NAMES, device_for, dtype_for

TIMEOUT_MINUTES = 120.0  # Rank 0 may read all weights for their hash while the others wait.


def prune(request: PruneRequest) -> dict[str, Any]:
    """Prune a checkpoint on all ranks; returns the report. Rank 0 writes the output."""
    started, device = time.monotonic(), device_for(request.device)
    with init_distributed(device.type, TIMEOUT_MINUTES) as world:
        console.quiet = console.quiet or not world.is_rank0
        if device.type == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())
            torch.cuda.reset_peak_memory_stats(device)
        with raise_on_all_ranks(world):
            source, task = _checked(request, world, device)
        run_on_rank0(world, lambda: refuse_destination(request.destination, is_file=request.save == "mask"))
        calibration = run_on_rank0(world, lambda: _windows(request, source))
        tokens_BL = None if calibration is None else calibration.tokens_BL
        with raise_on_all_ranks(world):
            mesh = _mesh(request, world, tokens_BL, device)
        about = {
            "method": task.method,
            "pattern": str(task.pattern),
            "update_weights": task.update,
            "dense_inputs": request.dense_inputs,
            "calibration": calibration.described if calibration else None,
            "seed": request.seed,
            "computed": f"{NAMES[task.dtype]} on {device.type}, scores and factors in fp32",
        }
        finished = FinishedLayers(request.destination, source, task, tokens_BL)
        resumed = run_on_rank0(world, finished.open)
        layers = pruned_layers(source, task, tokens_BL, mesh, lambda number: finished.read(number, resumed))
        rows: list[dict[str, Any]] = []
        # Around the bar of the writer, which counts bytes and gets a row of its own.
        bar = console.progress("prune", len(finished.names), "layers", len(resumed), lines=False)
        with bar as progress, closing(_reported(layers, rows, finished, resumed, progress)) as reported:
            if world.is_rank0:
                _write(request, source, task, reported, about)
            else:
                for _ in reported:
                    pass
        if world.is_rank0:
            finished.remove()
    peak = {"peak_device_bytes": torch.cuda.max_memory_allocated(device)} if device.type == "cuda" else {}
    return {
        "checkpoint": str(source.path),
        "path": str(request.destination),
        "saved": request.save,
        **about,
        **_totals(rows, maskable(source.config)),
        "ranks": world.size,
        "tensor": request.tensor,
        "resumed_layers": len(resumed),
        "seconds": round(time.monotonic() - started, 3),
        **peak,
        "layers": [layer["row"] for layer in rows],
    }


def _checked(request: PruneRequest, world: World, device: torch.device) -> tuple[CheckpointSource, Task]:
    """The checkpoint, and what to do with it."""
    (method, update), pattern = method_and_update(request), Pattern.parse(request.pattern)
    if world.size % request.tensor:
        raise UserError(f"{world.size} ranks are not a multiple of --tensor {request.tensor}", where="--tensor")
    source = open_source(request.checkpoint)
    check(source, source.config)
    sizes = maskable(source.config)
    names = chosen(sizes, request.include, request.exclude)
    pattern.check({name: sizes[name] for name in names})
    dtype = dtype_for(request.dtype, source, device)
    return source, Task(method, pattern, names, update, request.dense_inputs, device, dtype)


def _mesh(request: PruneRequest, world: World, tokens_BL: Tensor | None, device: torch.device) -> Mesh:
    data, batches = world.size // request.tensor, 0 if tokens_BL is None else len(batches_of(tokens_BL, device))
    if tokens_BL is not None and data > batches:
        raise UserError(
            f"{data} data ranks share {batches} batches of calibration windows, so some would have none",
            where="--samples",
            hint="use fewer ranks, more windows, or --tensor, which shares the matrices",
        )
    return meshes.make(ParallelSection(tensor=request.tensor), device.type)


def _windows(request: PruneRequest, source: CheckpointSource) -> Windows | None:
    """The calibration tokens; only magnitude does not need them."""
    if request.calibration is None:
        return None
    asked = Calibration(request.calibration, request.samples, request.length, request.seed)
    return windows_of(source, asked, request.tokenizer)


def _reported(
    layers: Generator[LayerOnDevice, None, None],
    rows: list[dict[str, Any]],
    finished: FinishedLayers,
    resumed: list[int],
    progress: ProgressBar,
) -> Generator[LayerOnDevice, None, None]:
    """The layers, with a line and a row of the report for each; rank 0 saves new ones."""
    total, is_rank0 = len(finished.names), detect(os.environ).is_rank0
    if resumed:
        console.say(f"{len(resumed)} of {total} layers were finished by an earlier command")
    with closing(layers):
        spent: list[float] = []
        for layer in layers:
            if layer.number not in resumed:
                spent.append(layer.seconds)
                progress.advance(1)
                if is_rank0:
                    finished.write(layer)
            row = layer.summary()
            tied, groups = layer.ties()
            counts = {"pruned": layer.pruned(), "elements": layer.elements(), "tied": tied, "groups": groups}
            rows.append({"row": row, **counts})
            left = total - len(rows)
            console.say(as_line(row) + (_time_left(left, spent) if left and spent else ""))
            yield layer


def _time_left(layers: int, spent: list[float]) -> str:
    """The time that the remaining layers need, by the mean of those that were pruned."""
    each = sum(spent) / len(spent)
    return f"  {layers} layer{'s' if layers > 1 else ''} left, about {units.duration(layers * each)}"


def _write(
    request: PruneRequest,
    source: CheckpointSource,
    task: Task,
    layers: Iterator[LayerOnDevice],
    about: dict[str, Any],
) -> None:
    """Write the result during pruning."""
    if request.save == "mask":
        each = ((name, matrix.mask_OI) for layer in layers for name, matrix in layer.matrices.items())
        mask_file.write(request.destination, each, task.pattern, frozen_base.identity(source), about)
    else:
        pruned = PartlyPrunedSource(source, layers, task.names)
        convert(pruned, request.destination, Target("hf", tokenizer=request.tokenizer))


def _totals(report: list[dict[str, Any]], sizes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    keys = ("pruned", "elements", "tied", "groups")
    pruned, elements, tied, groups = (sum(layer[key] for layer in report) for key in keys)
    whole = sum(math.prod(size) for size in sizes.values())
    return {
        "sparsity": pruned / elements,
        "sparsity_of_all_layers": pruned / whole,
        "tied_groups": tied / groups,
    }


def as_line(row: dict[str, Any]) -> str:
    """A layer's row as a log line."""
    error = "unknown" if row["error"] is None else f"{row['error']:.5f}"
    shares = f"sparsity {row['sparsity']:.4f}  ties {row['tied_groups']:.4f}"
    return f"layer {row['layer']:3d}  {shares}  error {error}  {row['seconds']:.2f} s"


def as_text(report: dict[str, Any]) -> str:
    """The report as text."""
    head = {
        "written": f"{report['path']} ({report['saved']})",
        "method": report["method"] + (", weights updated" if report["update_weights"] else ""),
        "pattern": f"{report['pattern']}, {report['sparsity']:.4f} of the chosen matrices pruned",
        "ties": f"{100 * report['tied_groups']:.2f}% of the groups have equal scores at the cut; a hash decides",
        "calibration": report["calibration"] or "none",
        "ranks": f"{report['ranks']}, {report['tensor']} of them share matrices" if report["ranks"] > 1 else "1",
        "inputs": "of the dense model" if report["dense_inputs"] else "of the pruned layers before",
        "time": f"{report['seconds']:.1f} s",
    }
    lines = [f"{key:12} {value}" for key, value in head.items()]
    table = [f"{'layer':>5} {'sparsity':>9} {'ties':>7} {'error':>9} {'seconds':>8}"]
    for row in report["layers"]:
        error = "unknown" if row["error"] is None else f"{row['error']:.5f}"
        shares = f"{row['sparsity']:9.4f} {row['tied_groups']:7.4f}"
        table.append(f"{row['layer']:5d} {shares} {error:>9} {row['seconds']:8.2f}")
    return "\n".join([*lines, "", *table])
