"""Measures the time of one layer on the local device, for `steelyard plan profile`.

One layer is built with the widths of one of `tensor` ranks. Its forward and backward passes are timed as in a step,
compiled if a run would compile. All-reduces over tensor ranks are not included: the planner adds them from the links.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import steelyard
from steelyard import model as models
from steelyard.core.console import console
from steelyard.core.errors import UserError
from steelyard.core.recipe import Recipe
from steelyard.core.recipe.blocks import ExpertsBlock, LayerBlock
from steelyard.core.run import now
from steelyard.model import StageSpec
from steelyard.model.transformer import TransformerLayer
from steelyard.parallel.parallelize import compile_options
from steelyard.sizes.gpu_catalogue import by_device_name
from steelyard.sizes.param_count import expert_keys
from steelyard.training import bandwidth_probe
from steelyard.training import device as devices

WARM_UP, ROUNDS = 3, 10
BUDGET = 40.0  # Seconds for all layers. A slow device gets fewer rounds, and larger micro-batches are left out.


def measure(
    recipe: Recipe, tensors: list[int], micro_batches: list[int], with_links: bool = False, budget: float = BUDGET
) -> dict[str, Any]:
    """The profile of a recipe's layer, in the format of `plan.profile`; optionally with the link between two ranks.

    Layers take about `budget` seconds, after which no further one is begun: the planner scales from the nearest
    measured layer.
    """
    device = devices.choose(recipe)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    known = by_device_name(name)
    for tensor in tensors:  # Fail before anything is measured.
        shard_layer(measured_block(recipe), tensor)
    layers = _layers(recipe, device, [(tensor, size) for size in sorted(micro_batches) for tensor in tensors], budget)
    rates = _rates(device, devices.compute_dtype(recipe.train.precision, device))
    if with_links:
        rates |= bandwidth_probe.measure(device)
    return {
        "gpu": known.name if known else name,
        "device": name,
        "precision": recipe.train.precision,
        "family": recipe.model.family,
        "hidden": recipe.model.hidden,
        "heads": recipe.model.heads,
        "kv_heads": getattr(recipe.model, "kv_heads", recipe.model.heads),
        "ffn": recipe.model.ffn,
        **expert_keys(recipe.model),
        "sequence_length": recipe.data.sequence_length,
        "date": now(),
        "versions": {
            "steelyard": steelyard.__version__, "torch": str(torch.__version__), "python": platform.python_version(),
        },
        "host": {"machine": platform.machine(), "cores": os.cpu_count() or 1, "threads": torch.get_num_threads()},
        "rates": rates,
        "layers": layers,
    }  # fmt: skip


def measured_block(recipe: Recipe) -> LayerBlock:
    """The layer that is measured: the first with experts, otherwise the first."""
    layers = recipe.model.blocks.layers
    return next((layer for layer in layers if isinstance(layer.mlp, ExpertsBlock)), layers[0])


def shard_layer(layer: LayerBlock, tensor: int) -> LayerBlock:
    """A layer with the widths of a tensor rank."""
    attention, mlp = layer.attention, layer.mlp
    shared = (mlp.shared_ffn or 0) if isinstance(mlp, ExpertsBlock) else 0
    if attention.heads % tensor or attention.kv_heads % tensor or mlp.ffn % tensor or shared % tensor:
        raise UserError(
            f"model.heads = {attention.heads}, its key-value heads or model.ffn = {mlp.ffn} "
            f"is not divisible by {tensor} tensor ranks",
            hint="measure other --tensor degrees; the planner scales from the nearest",
        )
    attention = replace(attention, heads=attention.heads // tensor, kv_heads=attention.kv_heads // tensor)
    if isinstance(mlp, ExpertsBlock) and mlp.shared_ffn is not None:
        mlp = replace(mlp, shared_ffn=mlp.shared_ffn // tensor)
    return replace(layer, attention=attention, mlp=replace(mlp, ffn=mlp.ffn // tensor))


def _layers(
    recipe: Recipe, device: torch.device, wanted: list[tuple[int, int]], budget: float
) -> list[dict[str, float]]:
    """Measured layers by tensor degree and micro-batch, small micro-batches first, until the time is up."""
    found: list[dict[str, float]] = []
    end = time.monotonic() + budget
    with console.progress("measuring layers", len(wanted), "layers") as progress:
        for number, (tensor, micro_batch) in enumerate(wanted):
            left = end - time.monotonic()
            if found and left <= 0:
                skipped = ", ".join(f"tensor {t} x micro-batch {m}" for t, m in wanted[number:])
                console.warn(f"not measured within {budget:g} s: {skipped}; the planner scales from the nearest layer")
                break
            seconds = _layer(recipe, device, (tensor, micro_batch), left / (len(wanted) - number))
            found.append({"tensor": tensor, "micro_batch": micro_batch, **seconds})
            progress.advance(1, f"tensor {tensor}, micro-batch {micro_batch}")
    return sorted(found, key=lambda one: (one["tensor"], one["micro_batch"]))


def _layer(recipe: Recipe, device: torch.device, size: tuple[int, int], budget: float) -> dict[str, float]:
    """Seconds of a layer's forward and backward pass; `size` is the tensor degree and the micro-batch.

    The first round compiles; no other one begins after the budget.
    """
    tensor, micro_batch = size
    dtype = devices.compute_dtype(recipe.train.precision, device)
    built = models.build(recipe.model, StageSpec(range(1), first=False, last=False))
    built.layers["0"] = TransformerLayer(shard_layer(measured_block(recipe), tensor), 0.0, 0.0)
    built = built.to(device)
    built.dtype = dtype
    for parameter in built.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    if devices.compiles(recipe, device):
        for layer in built.layers.values():
            layer.compile(options=compile_options(recipe))
    shape = (micro_batch, recipe.data.sequence_length, recipe.model.hidden)
    stream = torch.randn(shape, device=device, dtype=dtype, requires_grad=True)
    gradient = torch.randn(shape, device=device, dtype=dtype)
    outcome: list[Tensor] = []

    def forward() -> None:
        outcome[:] = [built(stream)]

    def backward() -> None:
        outcome[0].backward(gradient)

    both: list[tuple[float, float]] = []
    end = time.monotonic() + budget
    while len(both) < WARM_UP + ROUNDS and (not both or time.monotonic() < end):
        both.append((_seconds(forward, device), _seconds(backward, device)))
    timed = both[min(WARM_UP, len(both) // 2) :]
    ahead, back = (sorted(column)[len(timed) // 2] for column in zip(*timed, strict=True))
    return {"forward": ahead, "backward": back}


def _rates(device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """TFLOP/s of large matrix products and GB/s of large copies on this device."""
    size = 4096 if device.type == "cuda" else 512
    one, other = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    block = torch.empty(1 << (28 if device.type == "cuda" else 24), dtype=torch.uint8, device=device)
    products = min(_seconds(lambda: one @ other, device) for _ in range(ROUNDS))
    copies = min(_seconds(block.clone, device) for _ in range(ROUNDS))
    return {"product_tflops": 2 * size**3 / products / 1e12, "copy_gbps": 2 * block.numel() / copies / 1e9}


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began
