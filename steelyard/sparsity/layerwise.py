"""Layer-wise pruning, with one layer on the device at a time.

The calibration windows are embedded once. Then each layer is loaded, run on the windows while the inputs of its
matrices are summed into x x^T, pruned, and run again: its outputs are the inputs of the next layer. So a layer is
pruned for the outputs of the pruned layers before it. With `dense_inputs` the outputs of the first run are used, as if
nothing were pruned. The hidden states of the windows stay on the device if they take at most a quarter of its free
memory, otherwise in host memory.

Every expert is pruned by the tokens that are routed to it (`input_statistics`), or by magnitude if there are none.
Ranks share the batches and the matrices (`prune_ranks`). A layer that an earlier command finished is not pruned again.

Tensor suffixes: B windows, L length, D hidden, O outputs, I inputs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from steelyard import model
from steelyard.checkpoint.formats import CheckpointSource
from steelyard.checkpoint.formats.row_scales import ValueFormat
from steelyard.core.console import console
from steelyard.model import LanguageModel, StageSpec
from steelyard.model.experts import MATRIX_MODULES
from steelyard.parallel import mesh as meshes
from steelyard.parallel.mesh import Mesh
from steelyard.sparsity import prune_ranks
from steelyard.sparsity.input_statistics import (
    Gram,
    InputGroup,
    InputWatcher,
    MatrixReader,
    matrices_of,
    parameter_of,
    stacked,
)
from steelyard.sparsity.one_shot import DAMPING, Pruned, prune_matrix, reconstruction_error
from steelyard.sparsity.patterns import Pattern
from steelyard.sparsity.prune_request import Method
from steelyard.sparsity.rounding import round_matrix

CPU = torch.device("cpu")
TOKENS_AT_ONCE = {"cpu": 4096, "cuda": 16384}
FEWEST_BATCHES = 32  # if there are as many windows; ranks share batches, which are the same on every layout
EXPERTS_SHOWN = 8  # in a warning
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
    value_format: ValueFormat | None = None
    """Instead of pruning, round the weights to this format (`rounding.py`)."""


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

    def error(self) -> float | None:
        """The relative output error over all matrices with inputs."""
        known = [row for row in self.rows if row["squared_output"]]
        whole: float = sum(row["squared_output"] for row in known)
        return sum(row["squared_error"] for row in known) / whole if known else None

    def summary(self) -> dict[str, Any]:
        """The layer in one row: sparsity, ties, the relative output error over all its matrices, time."""
        tied, groups = self.ties()
        return {
            "layer": self.number,
            "sparsity": self.pruned() / self.elements(),
            "tied_groups": tied / groups,
            "error": self.error(),
            "seconds": round(self.seconds, 3),
            "matrices": [_report_row(row) for row in self.rows],
        }


def _report_row(row: dict[str, Any]) -> dict[str, Any]:
    error = row["squared_error"] / row["squared_output"] if row["squared_output"] else None
    tied, groups = row["ties"]
    sparsity = row["pruned"] / row["elements"]
    shown = {"name": row["name"], "sparsity": sparsity, "tied_groups": tied / groups, "error": error}
    return shown | {key: row[key] for key in ("damping", "dead", "tokens")}


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
            sizes = source.sizes()
            matrices = [matrix for name in names for matrix in matrices_of(name, sizes[name])]
            groups = [InputGroup(index, [matrix]) for index, matrix in enumerate(matrices)]
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
    dense = MatrixReader(source)
    mine: dict[str, Pruned] = {}
    rows: dict[str, dict[str, Any]] = {}
    for group in groups:
        for matrix in group.names:
            if owners[matrix] == mesh.world.index:
                mine[matrix], rows[matrix] = _prune(dense(matrix), matrix, group.gram, task)
        group.gram = None
    rows = prune_ranks.gathered(mesh, rows)
    changes = task.update or task.value_format is not None
    pruned = prune_ranks.exchanged(mesh, owners, mine, dense, changes, task.device)
    chosen = {parameter_of(matrix)[0] for matrix in owners}
    matrices = stacked(pruned, [name for name in task.names if name in chosen])
    names = [matrix for name, each in matrices.items() for matrix in matrices_of(name, tuple(each.mask_OI.shape))]
    ordered = [rows[name] for name in names]
    if mesh.world.index == 0:
        for name in names:
            _remark(name, rows[name])
        if task.value_format is not None:
            _warn_of_few_tokens(number, ordered, "are rounded to their nearest values")
        elif task.method != "magnitude":
            _warn_of_few_tokens(number, ordered, "magnitude prunes")
    return LayerOnDevice(number, matrices, time.monotonic() - begun, ordered)


def _remark(name: str, row: dict[str, Any]) -> None:
    if row["damping"] is not None and row["damping"] > DAMPING:
        console.warn(f"{name}: the Cholesky factorisation of H needed a damping of {row['damping']:g} x mean diagonal")
    if row["dead"]:
        console.say(f"{name}: {row['dead']} inputs are zero in every token; their weights are pruned first")


def _warn_of_few_tokens(number: int, rows: list[dict[str, Any]], without: str) -> None:
    """Name the experts whose statistics come from fewer tokens than a matrix has inputs, or from none."""
    few = {
        row["expert"]: row["tokens"]
        for row in rows
        if row["expert"] is not None and row["tokens"] is not None and row["tokens"] < row["inputs"]
    }
    none = [str(expert) for expert, tokens in few.items() if not tokens]
    some = [f"{expert} ({tokens})" for expert, tokens in few.items() if tokens]
    if none:
        console.warn(
            f"layers.{number}.mlp.experts: no calibration token was routed to {_listed(none)}, which {without}; "
            "use more --samples"
        )
    if some:
        console.warn(
            f"layers.{number}.mlp.experts: fewer calibration tokens than inputs were routed to {_listed(some)}; "
            "use more --samples"
        )


def _listed(experts: list[str]) -> str:
    more = f" and {len(experts) - EXPERTS_SHOWN} more" if len(experts) > EXPERTS_SHOWN else ""
    return f"expert{'s' if len(experts) > 1 else ''} {', '.join(experts[:EXPERTS_SHOWN])}{more}"


def _prune(weight_OI: Tensor, name: str, gram: Gram | None, task: Task) -> tuple[Pruned, dict[str, Any]]:
    weight_OI = weight_OI.to(task.device)
    hessian = gram.hessian if gram is not None and gram.tokens else None
    method: Method = "magnitude" if hessian is None else task.method
    if task.value_format is None:
        pruned = prune_matrix(weight_OI, hessian, task.pattern, method, task.update)
    else:
        pruned = _rounded(weight_OI, gram, task.value_format)
    lost, whole = (
        (0.0, 0.0) if hessian is None else reconstruction_error(weight_OI, pruned.weight_OI, hessian.matrix_II)
    )
    tokens = None if gram is None else gram.tokens
    row = {
        "name": name.replace(".weight", ""),
        "expert": parameter_of(name)[1],
        "tokens": tokens,
        "inputs": weight_OI.shape[1],
        "elements": weight_OI.numel(),
        "pruned": weight_OI.numel() - int(pruned.mask_OI.sum()),
        "squared_error": lost * (tokens or 0),  # H is a mean over tokens, of which experts see different numbers.
        "squared_output": whole * (tokens or 0),
        "damping": pruned.damping,
        "dead": pruned.dead,
        "ties": pruned.ties,
    }
    return replace(pruned, mask_OI=pruned.mask_OI.cpu(), weight_OI=pruned.weight_OI.cpu()), row


def _rounded(weight_OI: Tensor, gram: Gram | None, value_format: ValueFormat) -> Pruned:
    """Fewer tokens than inputs say too little of other tokens."""
    has_enough = gram is not None and gram.tokens >= weight_OI.shape[1]
    hessian_II = gram.hessian.matrix_II if gram is not None and has_enough else None
    return Pruned(weight_OI != 0, round_matrix(weight_OI, hessian_II, value_format), ties=(0, weight_OI.numel()))


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


def _stage(source: CheckpointSource, task: Task, stage_spec: StageSpec) -> LanguageModel:
    """A stage of the model on the device: matrices in the compute dtype, norms in fp32."""
    with torch.device("meta"):
        stage = model.build(source.config, stage_spec)
    for module in stage.modules():
        if isinstance(module, MATRIX_MODULES):
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
    watcher, modules = InputWatcher(mesh), dict(stage.named_modules())
    handles = [watcher.watch(name, modules[name.removesuffix(".weight")]) for name in names]
    with torch.no_grad():
        for number, batch_BLD in enumerate(stream.batches):
            output_BLD = stage(batch_BLD.to(stream.device))
            if keep:
                stream.put(number, output_BLD)
    for handle in handles:
        handle.remove()
    return watcher.finished()
