"""One-shot pruning of a checkpoint: validates the request, then prunes layer by layer while writing the output.

The complete output appears by rename; a killed command leaves nothing.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from steelyard.checkpoint.formats import CheckpointSource, open_source
from steelyard.checkpoint.formats.hf_config import positions_of
from steelyard.checkpoint.formats.source import check
from steelyard.checkpoint.formats.write import Target, convert, refuse_destination
from steelyard.core.console import console
from steelyard.core.errors import UserError
from steelyard.core.recipe.model_section import GptConfig
from steelyard.sparsity import frozen_base, mask_file
from steelyard.sparsity.calibration import Calibration, Windows, is_prefix, windows
from steelyard.sparsity.layerwise import LayerOnDevice, Task, pruned_layers
from steelyard.sparsity.one_shot import Method, method_named
from steelyard.sparsity.patterns import Pattern
from steelyard.sparsity.pruned_source import BeingPruned
from steelyard.sparsity.target_modules import chosen, maskable
from steelyard.text import tokenizer as tokenizers
from steelyard.training.device import NAMES, device_for, dtype_for

LONGEST = 4096  # The default length of windows, if the model supports it.


@dataclass(frozen=True)
class PruneRequest:
    """The options of `steelyard prune`."""

    checkpoint: str
    destination: Path
    method: str
    pattern: str = "2:4"
    update: bool | None = None
    """Whether the remaining weights compensate for the pruned ones; by default with sparsegpt if weights are saved."""
    calibration: str | None = None
    samples: int = 128
    length: int | None = None
    seed: int = 0
    save: str = "weights"
    dense_inputs: bool = False
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    tokenizer: str | None = None
    device: str = "auto"
    dtype: str = "auto"


def prune(request: PruneRequest) -> dict[str, Any]:
    """Prune a checkpoint; returns the report."""
    method, pattern = method_named(request.method), Pattern.parse(request.pattern)
    update = _update(request, method)
    refuse_destination(request.destination, is_file=request.save == "mask")
    source = open_source(request.checkpoint)
    check(source, source.config)
    sizes = maskable(source.config)
    names = chosen(sizes, request.include, request.exclude)
    pattern.check({name: sizes[name] for name in names})
    device = device_for(request.device)
    task = Task(method, pattern, names, update, request.dense_inputs, device, dtype_for(request.dtype, source, device))
    calibration = _windows(request, source, method)
    started = time.monotonic()
    if device.type == "cuda":
        torch.cuda.init()
        torch.cuda.reset_peak_memory_stats(device)
    about = {
        "method": method,
        "pattern": str(pattern),
        "update_weights": update,
        "dense_inputs": request.dense_inputs,
        "calibration": calibration.described if calibration else None,
        "seed": request.seed,
        "computed": f"{NAMES[task.dtype]} on {device.type}, scores and factors in fp32",
    }
    report = _write(request, source, task, None if calibration is None else calibration.tokens_BL, about)
    peak = {"peak_device_bytes": torch.cuda.max_memory_allocated(device)} if device.type == "cuda" else {}
    return {
        "checkpoint": str(source.path),
        "path": str(request.destination),
        "saved": request.save,
        **about,
        **_totals(report, sizes),
        "seconds": round(time.monotonic() - started, 3),
        **peak,
        "layers": [layer["row"] for layer in report],
    }


def _update(request: PruneRequest, method: Method) -> bool:
    if request.update and method != "sparsegpt":
        raise UserError(f"{method} does not update weights", where="--update-weights", hint="use --method sparsegpt")
    if request.update and request.save == "mask":
        raise UserError(
            "a mask file contains no weights, so the update would be lost",
            where="--update-weights",
            hint="use --save weights, or remove --update-weights",
        )
    return method == "sparsegpt" and request.save == "weights" if request.update is None else request.update


def _windows(request: PruneRequest, source: CheckpointSource, method: Method) -> Windows | None:
    """The calibration tokens; only magnitude does not need them."""
    if request.calibration is None:
        if method != "magnitude":
            raise UserError(f"{method} needs calibration", where="--calibration", hint="give a text or token files")
        return None
    positions = positions_of(source.config, source.extra)
    length = request.length or min(LONGEST, positions)
    if length > positions:
        if isinstance(source.config, GptConfig):
            raise UserError(
                f"windows of {length} tokens are longer than the model's {positions} positions",
                where="--sequence-length",
                hint=f"use {positions} or less",
            )
        console.warn(f"windows of {length} tokens are longer than the model's context of {positions}")
    tokenizer = None
    if not is_prefix(request.calibration) and (request.tokenizer or source.tokenizer):
        tokenizer = tokenizers.load_tokenizer(request.tokenizer) if request.tokenizer else source.load_tokenizer()
    calibration = Calibration(request.calibration, request.samples, length, request.seed)
    return windows(calibration, tokenizer, source.config.vocab)


def _write(
    request: PruneRequest, source: CheckpointSource, task: Task, tokens_BL: Tensor | None, about: dict[str, Any]
) -> list[dict[str, Any]]:
    """Write the result during pruning; returns a row for each layer."""
    rows: list[dict[str, Any]] = []

    def reported() -> Generator[LayerOnDevice, None, None]:
        with closing(pruned_layers(source, task, tokens_BL)) as layers:
            for layer in layers:
                row = layer.summary()
                tied, groups = layer.ties()
                counts = {"pruned": layer.pruned(), "elements": layer.elements(), "tied": tied, "groups": groups}
                rows.append({"row": row, **counts})
                console.say(as_line(row))
                yield layer

    with closing(reported()) as layers:
        if request.save == "mask":
            each = ((name, matrix.mask_OI) for layer in layers for name, matrix in layer.matrices.items())
            mask_file.write(request.destination, each, task.pattern, frozen_base.identity(source), about)
        else:
            convert(
                BeingPruned(source, layers, task.names), request.destination, Target("hf", tokenizer=request.tokenizer)
            )
    return rows


def _totals(report: list[dict[str, Any]], sizes: dict[str, tuple[int, int]]) -> dict[str, Any]:
    keys = ("pruned", "elements", "tied", "groups")
    pruned, elements, tied, groups = (sum(layer[key] for layer in report) for key in keys)
    whole = sum(rows * columns for rows, columns in sizes.values())
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
