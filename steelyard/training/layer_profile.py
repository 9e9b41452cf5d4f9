"""Measures the time of one layer on the local device, for `steelyard plan profile`.

One layer is built with the widths of one of `tensor` ranks. Its forward and backward passes are timed as in a step,
compiled if a run would compile. All-reduces over tensor ranks are not included: the planner adds them from the links.
"""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
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
# Seconds from the start of the command; what begins and ends a process takes a few more. A slow device gets fewer
# rounds, and larger micro-batches and the link are left out.
BUDGET = 50.0


def measure(
    recipe: Recipe,
    tensors: list[int],
    micro_batches: list[int],
    with_links: bool = False,
    budget: float = BUDGET,
    began: float | None = None,
) -> dict[str, Any]:
    """The profile of a recipe's layer, in the format of `plan.profile`; optionally with the link between two ranks.

    The command `began` then, in seconds of `time.monotonic`, and ends after about `budget` seconds. `left_out` names
    what did not fit; the smallest layer is always measured. The planner scales from the nearest measured layer.
    """
    began = time.monotonic() if began is None else began
    imports = time.monotonic() - began
    end = began + budget
    device = devices.choose(recipe)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    known = by_device_name(name)
    for tensor in tensors:  # Fail before anything is measured.
        shard_layer(measured_block(recipe), tensor)
    rates = _rates(device, devices.compute_dtype(recipe.train.precision, device))
    with_links = with_links and bandwidth_probe.can_measure(device)
    # The two processes of the link import what this one did, at the same time.
    reserved = min(3 + 2 * imports, max(0.0, end - time.monotonic()) / 2) if with_links else 0.0
    wanted = [(tensor, size) for size in sorted(micro_batches) for tensor in tensors]
    layers = _layers(recipe, device, wanted, end - reserved)
    left_out = [f"tensor {tensor} x micro-batch {size}" for tensor, size in wanted[len(layers) :]]
    if with_links:
        found = bandwidth_probe.measure(device, end - time.monotonic())
        rates |= found or {}
        left_out += [] if found else ["the link between two ranks"]
    if left_out:
        console.warn(
            f"left out, because this takes at most about {budget:g} s: {', '.join(left_out)}; "
            "the planner scales from the nearest measured layer, and takes links from the cluster file"
        )
    layers.sort(key=lambda one: (one["tensor"], one["micro_batch"]))
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
        "left_out": left_out,
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


def _layers(recipe: Recipe, device: torch.device, wanted: list[tuple[int, int]], end: float) -> list[dict[str, float]]:
    """Measured layers by tensor degree and micro-batch, in this order, until the time is up; at least one."""
    found: list[dict[str, float]] = []
    expected = 0.0  # Seconds until the first round of a layer ends.
    with console.progress("measuring layers", len(wanted) * (WARM_UP + ROUNDS), "rounds") as progress:
        for number, (tensor, micro_batch) in enumerate(wanted):
            began = time.monotonic()
            if found:
                one_round, growth = found[-1]["forward"] + found[-1]["backward"], micro_batch / wanted[number - 1][1]
                if began + expected + max(0.0, growth - 1) * one_round > end:
                    break
            note = f"tensor {tensor}, micro-batch {micro_batch}"
            rounds = _rounds(recipe, device, (tensor, micro_batch))
            both = [next(rounds)]
            progress.advance(1, note)
            expected = time.monotonic() - began
            last = began + (end - began) / (len(wanted) - number)
            while len(both) < WARM_UP + ROUNDS and time.monotonic() + sum(both[-1]) < last:
                both.append(next(rounds))
                progress.advance(1, note)
            progress.advance(WARM_UP + ROUNDS - len(both), note)
            timed = both[min(WARM_UP, len(both) // 2) :]
            ahead, back = (sorted(column)[len(timed) // 2] for column in zip(*timed, strict=True))
            found.append({"tensor": tensor, "micro_batch": micro_batch, "forward": ahead, "backward": back})
    return found


def _rounds(recipe: Recipe, device: torch.device, size: tuple[int, int]) -> Iterator[tuple[float, float]]:
    """Seconds of a layer's forward and backward pass, again and again; the first round compiles.

    `size` is the tensor degree and the micro-batch.
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

    while True:
        yield _seconds(forward, device), _seconds(backward, device)


def _rates(device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """TFLOP/s of large matrix products and GB/s of large copies on this device."""
    size = 4096 if device.type == "cuda" else 512
    one, other = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    block = torch.empty(1 << (28 if device.type == "cuda" else 24), dtype=torch.uint8, device=device)
    work = {"products": lambda: one @ other, "copies": block.clone}
    least = dict.fromkeys(work, math.inf)
    with console.progress("measuring rates", len(work) * ROUNDS, "rounds") as progress:
        for what, _ in product(work, range(ROUNDS)):
            least[what] = min(least[what], _seconds(work[what], device))
            progress.advance(1, what)
    return {
        "product_tflops": 2 * size**3 / least["products"] / 1e12,
        "copy_gbps": 2 * block.numel() / least["copies"] / 1e9,
    }


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began
