"""Layer-wise pruning, with one layer on the device at a time.

The calibration windows are embedded once. Then each layer is loaded, run on the windows while the inputs of its
matrices are summed into x x^T, pruned, and run again: its outputs are the inputs of the next layer. So a layer is
pruned for the outputs of the pruned layers before it. With `dense_inputs` the outputs of the first run are used, as if
nothing were pruned. The hidden states of the windows stay on the device if they take at most a quarter of its free
memory, otherwise in host memory.

Matrices with the same input (query, key and value; gate and up) share one sum. The sums are fp64: fp32 products of
batches add up exactly there, unless they differ by more than 2^24 in size, so the order of the batches does not matter.
Ranks share the batches and the matrices (`prune_ranks`). A layer that an earlier command finished is not pruned again.

Tensor suffixes: B windows, L length, D hidden, O outputs, I inputs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
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
from steelyard.parallel import mesh as meshes
from steelyard.parallel.mesh import Mesh
from steelyard.sparsity import prune_ranks
from steelyard.sparsity.one_shot import DAMPING, Hessian, Pruned, prune_matrix, reconstruction_error
from steelyard.sparsity.patterns import Pattern
from steelyard.sparsity.prune_request import Method

CPU = torch.device("cpu")
TOKENS_AT_ONCE = {"cpu": 4096, "cuda": 16384}
FEWEST_BATCHES = 32  # if there are as many windows; ranks share batches, which are the same on every layout
Restore = Callable[[int], "LayerOnDevice | None"]


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


def layer_names(names: list[str]) -> dict[int, list[str]]:
    """The matrices of each layer, by its number."""
    by_layer: dict[int, list[str]] = {}
    for name in names:
        by_layer.setdefault(int(name.split(".")[1]), []).append(name)
    return by_layer


def pruned_layers(
    source: CheckpointSource,
    task: Task,
    tokens_BL: Tensor | None,
    mesh: Mesh | None = None,
    restore: Restore = lambda number: None,
) -> Generator[LayerOnDevice, None, None]:
    """Prune the layers that contain one of the task's matrices, in order. Without tokens, only by the weights.

    All ranks of the mesh get every layer. `restore` returns the layers that an earlier command has finished.
    """
    mesh, by_layer = mesh or meshes.alone(), layer_names(task.names)
    stream = None if tokens_BL is None else _embedded(source, task, tokens_BL, mesh)
    for number in range(max(by_layer) + 1):
        names, begun = by_layer.get(number, []), time.monotonic()
        layer = restore(number) if names else None
        is_last, is_new = number == max(by_layer), bool(names) and layer is None
        stage = None  # Free the last layer before this one is loaded.
        if stream is not None and (is_new or not is_last):
            stage = _stage(source, task, StageSpec(range(number, number + 1), first=False, last=False))
        if is_new:
            groups = [InputGroup(index, [name]) for index, name in enumerate(names)]
            if stage is not None and stream is not None:
                groups = _run_layer(stage, stream, names, task.dense_inputs, mesh)
            layer = _pruned_layer(number, source, groups, task, mesh, begun)
        if stage is not None and stream is not None and not is_last and not (is_new and task.dense_inputs):
            if layer is not None and not task.dense_inputs:
                with torch.no_grad():
                    for name, pruned in layer.matrices.items():
                        stage.get_parameter(name).copy_(pruned.weight_OI)
            _run_layer(stage, stream, [], True, mesh)
        if layer is not None:
            yield layer


def _pruned_layer(
    number: int, source: CheckpointSource, groups: list[InputGroup], task: Task, mesh: Mesh, begun: float
) -> LayerOnDevice:
    """Prune this rank's matrices of a layer and get those of the other ranks."""
    owners = prune_ranks.owners(mesh, [group.names for group in groups], is_calibrated=groups[0].is_calibrated)
    mine: dict[str, Pruned] = {}
    rows: dict[str, dict[str, Any]] = {}
    for group in groups:
        for name in group.names:
            if owners[name] == mesh.world.index:
                mine[name], rows[name] = _prune(source.tensor(name), name, group.gram, task)
        group.gram = None
    rows = prune_ranks.gathered(mesh, rows)
    matrices = prune_ranks.exchanged(mesh, owners, mine, source.tensor, task.update, task.device)
    names = [name for name in task.names if name in owners]
    if mesh.world.index == 0:
        for name in names:
            _remark(name, rows[name])
    return LayerOnDevice(
        number, {name: matrices[name] for name in names}, time.monotonic() - begun, [rows[name] for name in names]
    )


def _remark(name: str, row: dict[str, Any]) -> None:
    if row["damping"] is not None and row["damping"] > DAMPING:
        console.warn(f"{name}: the Cholesky factorisation of H needed a damping of {row['damping']:g} x mean diagonal")
    if row["dead"]:
        console.say(f"{name}: {row['dead']} inputs are zero in every token; their weights are pruned first")


def _prune(weight_OI: Tensor, name: str, gram: Gram | None, task: Task) -> tuple[Pruned, dict[str, Any]]:
    weight_OI = weight_OI.to(task.device)
    hessian = None if gram is None else gram.hessian
    pruned = prune_matrix(weight_OI, hessian, task.pattern, task.method, task.update)
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
    """The sum of x x^T over all tokens seen: fp32 products of batches, added in fp64."""

    def __init__(self, inputs: int, device: torch.device) -> None:
        self.sum_II = torch.zeros(inputs, inputs, device=device, dtype=torch.float64)
        self.tokens = 0

    def add(self, x: Tensor) -> None:
        """Add inputs, whose last dimension is the channels."""
        rows = x.flatten(0, -2)
        self.tokens += len(rows)
        if rows.dtype == torch.float32 or rows.device.type != "cuda":
            rows = rows.float()
            self.sum_II += torch.mm(rows.t(), rows)
        else:  # Products of bf16 numbers are exact in fp32, and accumulate in fp32.
            self.sum_II += torch.mm(rows.t(), rows, out_dtype=torch.float32)

    @cached_property
    def hessian(self) -> Hessian:
        """(2/n) sum x x^T in fp32, after all tokens; the sum is freed."""
        matrix_II = self.sum_II.mul_(2 / self.tokens).float()
        del self.sum_II
        return Hessian(matrix_II)


@dataclass
class InputGroup:
    """Matrices with the same input, in the order in which they are used, and the sum of that input.

    The sum is None on ranks that do not have it, and without calibration.
    """

    number: int
    names: list[str]
    gram: Gram | None = None
    is_calibrated: bool = False


class HiddenStates:
    """The hidden states of all windows, on the device or in host memory."""

    def __init__(self, windows: list[Tensor], device: torch.device) -> None:
        self.device = device
        self.batches = windows

    def put(self, number: int, batch_BLD: Tensor) -> None:
        """Replace a batch by a layer's output."""
        self.batches[number] = batch_BLD.to(self.batches[number].device)


def batches_of(tokens_BL: Tensor, device: torch.device) -> tuple[Tensor, ...]:
    """The windows in batches, which do not depend on the number of ranks."""
    windows, length = tokens_BL.shape
    size = max(1, min(TOKENS_AT_ONCE[device.type] // length, windows // FEWEST_BATCHES))
    return tuple(tokens_BL.split(size))


def _embedded(source: CheckpointSource, task: Task, tokens_BL: Tensor, mesh: Mesh) -> HiddenStates:
    first = _stage(source, task, StageSpec(range(0), first=True, last=False))
    mine = batches_of(tokens_BL, task.device)[mesh.data.index :: mesh.data.size]
    home = _home(task, sum(batch.numel() for batch in mine) * source.config.hidden * task.dtype.itemsize)
    with torch.no_grad():
        batches = [first(batch.to(task.device)).to(home) for batch in mine]
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


def _run_layer(
    stage: LanguageModel, stream: HiddenStates, names: list[str], keep: bool, mesh: Mesh
) -> list[InputGroup]:
    """Run a layer on this rank's windows; `keep` stores its outputs. Returns the named matrices by input.

    The sums of inputs are of the windows of all ranks. A tensor rank has those of its groups only.
    """
    groups: dict[str, InputGroup] = {}  # by the first matrix
    last: list[tuple[Tensor, str]] = []

    def watch(name: str, linear: Linear) -> Any:
        def see(module: nn.Module, inputs: tuple[Tensor]) -> None:
            if last and last[0][0] is inputs[0]:
                group = groups[last[0][1]]
                group.names += [name] if name not in group.names else []
                return
            last[:] = [(inputs[0], name)]
            if name not in groups:
                groups[name] = InputGroup(len(groups), [name], is_calibrated=True)
                if prune_ranks.has_group(mesh, groups[name].number):
                    groups[name].gram = Gram(linear.in_features, inputs[0].device)
            gram = groups[name].gram
            if gram is not None:
                gram.add(inputs[0])

        return linear.register_forward_pre_hook(see)

    modules = dict(stage.named_modules())
    handles = [watch(name, modules[name.removesuffix(".weight")]) for name in names]
    with torch.no_grad():
        for number, batch_BLD in enumerate(stream.batches):
            output_BLD = stage(batch_BLD.to(stream.device))
            if keep:
                stream.put(number, output_BLD)
    for handle in handles:
        handle.remove()
    for group in groups.values():
        if group.gram is not None:
            group.gram.tokens = prune_ranks.sum_over_data(mesh, group.gram.sum_II, group.gram.tokens)
    return list(groups.values())
