"""Layer-wise pruning, with one layer on the device at a time.

The calibration windows are embedded once. Then each layer is loaded, run on the windows while the inputs of its
matrices are summed into x x^T, pruned, and run again: its outputs are the inputs of the next layer. So a layer is
pruned for the outputs of the pruned layers before it. With `dense_inputs` the outputs of the first run are used, as if
nothing were pruned. The hidden states of the windows stay on the device if they take at most a quarter of its free
memory, otherwise in host memory.

Matrices with the same input (query, key and value; gate and up) share one sum.

Tensor suffixes: B windows, L length, D hidden, O outputs, I inputs.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from steelyard import model
from steelyard.checkpoint.formats import CheckpointSource
from steelyard.core.console import console
from steelyard.model import LanguageModel, StageSpec
from steelyard.model.modules import Linear
from steelyard.sparsity.one_shot import DAMPING, Hessian, Method, Pruned, prune_matrix, reconstruction_error
from steelyard.sparsity.patterns import Pattern

CPU = torch.device("cpu")
TOKENS_AT_ONCE = {"cpu": 4096, "cuda": 16384}


@dataclass(frozen=True)
class Task:
    """Method, pattern and matrices of a pruning run, and its device and dtype."""

    method: Method
    pattern: Pattern
    names: list[str]
    update: bool = False
    dense_inputs: bool = False
    device: torch.device = CPU
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class LayerOnDevice:
    """A pruned layer: its matrices, on the CPU and in the source's dtype, and their rows of the report."""

    number: int
    matrices: dict[str, Pruned]
    seconds: float
    rows: list[dict[str, Any]]

    def pruned(self) -> int:
        """The number of pruned weights."""
        return sum(row["pruned"] for row in self.rows)

    def elements(self) -> int:
        """The number of weights of its matrices."""
        return sum(row["elements"] for row in self.rows)

    def ties(self) -> tuple[int, int]:
        """The groups in which equal scores met at the cut, and all groups."""
        tied, groups = zip(*(row["ties"] for row in self.rows), strict=True)
        return sum(tied), sum(groups)

    def summary(self) -> dict[str, Any]:
        """The layer in one row: sparsity, ties, the relative output error over all its matrices, time."""
        tied, groups = self.ties()
        known = [row for row in self.rows if row["squared_output"]]
        error = (
            sum(row["squared_error"] for row in known) / sum(row["squared_output"] for row in known) if known else None
        )
        return {
            "layer": self.number,
            "sparsity": self.pruned() / self.elements(),
            "tied_groups": tied / groups,
            "error": error,
            "seconds": round(self.seconds, 3),
            "matrices": [_report_row(row) for row in self.rows],
        }


def _report_row(row: dict[str, Any]) -> dict[str, Any]:
    error = row["squared_error"] / row["squared_output"] if row["squared_output"] else None
    tied, groups = row["ties"]
    sparsity = row["pruned"] / row["elements"]
    shown = {"name": row["name"], "sparsity": sparsity, "tied_groups": tied / groups, "error": error}
    return shown | {key: row[key] for key in ("damping", "dead")}


def pruned_layers(
    source: CheckpointSource, task: Task, tokens_BL: Tensor | None
) -> Generator[LayerOnDevice, None, None]:
    """Prune the layers that contain one of the task's matrices, in order. Without tokens, only by the weights."""
    by_layer: dict[int, list[str]] = {}
    for name in task.names:
        by_layer.setdefault(int(name.split(".")[1]), []).append(name)
    stream = None if tokens_BL is None else _embedded(source, task, tokens_BL)
    with console.progress("prune", len(by_layer), "layers", lines=False) as progress:
        for number in range(max(by_layer) + 1):
            names = by_layer.get(number, [])
            begun = time.monotonic()
            grams: dict[str, Gram] = {}
            stage = None  # Free the last layer before this one is loaded.
            if stream is not None:
                stage = _stage(source, task, StageSpec(range(number, number + 1), first=False, last=False))
                grams = _run_layer(stage, stream, names, keep=task.dense_inputs or not names)
            matrices, rows = {}, []
            for name in names:
                matrices[name], row = _prune(source.tensor(name), name, grams.pop(name, None), task)
                rows.append(row)
                if stage is not None:
                    with torch.no_grad():
                        stage.get_parameter(name).copy_(matrices[name].weight_OI)
            if stage is not None and stream is not None and names and not task.dense_inputs and number < max(by_layer):
                _run_layer(stage, stream, [], keep=True)
            if names:
                layer = LayerOnDevice(number, matrices, time.monotonic() - begun, rows)
                progress.advance(1)
                yield layer


def _prune(weight_OI: Tensor, name: str, gram: Gram | None, task: Task) -> tuple[Pruned, dict[str, Any]]:
    weight_OI = weight_OI.to(task.device)
    hessian = None if gram is None else gram.hessian
    pruned = prune_matrix(weight_OI, hessian, task.pattern, task.method, task.update)
    if pruned.damping is not None and pruned.damping > DAMPING:
        console.warn(f"{name}: the Cholesky factorisation of H needed a damping of {pruned.damping:g} x mean diagonal")
    if pruned.dead:
        console.say(f"{name}: {pruned.dead} inputs are zero in every token; their weights are pruned first")
    lost, whole = (
        (0.0, 0.0) if hessian is None else reconstruction_error(weight_OI, pruned.weight_OI, hessian.matrix_II)
    )
    row = {
        "name": name.removesuffix(".weight"),
        "elements": weight_OI.numel(),
        "pruned": weight_OI.numel() - int(pruned.mask_OI.sum()),
        "squared_error": lost,
        "squared_output": whole,
        "damping": pruned.damping,
        "dead": pruned.dead,
        "ties": pruned.ties,
    }
    return replace(pruned, mask_OI=pruned.mask_OI.cpu(), weight_OI=pruned.weight_OI.cpu()), row


class Gram:
    """The sum of x x^T over all tokens seen, in fp32."""

    def __init__(self, inputs: int, device: torch.device) -> None:
        self.sum_II = torch.zeros(inputs, inputs, device=device)
        self.tokens = 0

    def add(self, x: Tensor) -> None:
        """Add inputs, whose last dimension is the channels."""
        rows = x.flatten(0, -2)
        self.tokens += len(rows)
        if rows.dtype == torch.float32 or rows.device.type != "cuda":
            rows = rows.float()
            self.sum_II.addmm_(rows.t(), rows)
        else:  # Products of bf16 numbers are exact in fp32, and accumulate in fp32.
            self.sum_II += torch.mm(rows.t(), rows, out_dtype=torch.float32)

    @cached_property
    def hessian(self) -> Hessian:
        """(2/n) sum x x^T, after all tokens; the sum is scaled in place."""
        return Hessian(self.sum_II.mul_(2 / self.tokens))


class HiddenStates:
    """The hidden states of all windows, on the device or in host memory."""

    def __init__(self, windows: list[Tensor], device: torch.device) -> None:
        self.device = device
        self.batches = windows

    def put(self, number: int, batch_BLD: Tensor) -> None:
        """Replace a batch by a layer's output."""
        self.batches[number] = batch_BLD.to(self.batches[number].device)


def _embedded(source: CheckpointSource, task: Task, tokens_BL: Tensor) -> HiddenStates:
    first = _stage(source, task, StageSpec(range(0), first=True, last=False))
    at_once = max(1, TOKENS_AT_ONCE[task.device.type] // tokens_BL.shape[1])
    home = _home(task, tokens_BL.numel() * source.config.hidden * task.dtype.itemsize)
    with torch.no_grad():
        batches = [first(batch.to(task.device)).to(home) for batch in tokens_BL.split(at_once)]
    return HiddenStates(batches, task.device)


def _home(task: Task, needed: int) -> torch.device:
    if task.device.type == "cuda" and needed > torch.cuda.mem_get_info(task.device)[0] // 4:
        return torch.device("cpu")
    return task.device


def _stage(source: CheckpointSource, task: Task, part: StageSpec) -> LanguageModel:
    """A stage of the model on the device: matrices in the compute dtype, norms in fp32."""
    with torch.device("meta"):
        stage = model.build(source.config, part)
    for module in stage.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            module.to(task.dtype)
    stage.to_empty(device=task.device)
    stage.dtype = task.dtype
    with torch.no_grad():
        for name, parameter in stage.named_parameters():
            parameter.copy_(source.tensor(name))
    return stage.requires_grad_(False).eval()


def _run_layer(stage: LanguageModel, stream: HiddenStates, names: list[str], keep: bool) -> dict[str, Gram]:
    """Run a layer on all windows; returns the sums of the named matrices' inputs. `keep` stores its outputs."""
    grams: dict[str, Gram] = {}
    last: list[tuple[Tensor, str]] = []
    owner: dict[str, str] = {}

    def watch(name: str, linear: Linear) -> Any:
        def see(module: nn.Module, inputs: tuple[Tensor]) -> None:
            if last and last[0][0] is inputs[0]:
                owner[name] = last[0][1]
                return
            last[:] = [(inputs[0], name)]
            grams.setdefault(name, Gram(linear.in_features, inputs[0].device)).add(inputs[0])

        return linear.register_forward_pre_hook(see)

    modules = dict(stage.named_modules())
    handles = [watch(name, modules[name.removesuffix(".weight")]) for name in names]
    if names or keep:
        with torch.no_grad():
            for number, batch_BLD in enumerate(stream.batches):
                output_BLD = stage(batch_BLD.to(stream.device))
                if keep:
                    stream.put(number, output_BLD)
    for handle in handles:
        handle.remove()
    return {name: grams[owner.get(name, name)] for name in names}
