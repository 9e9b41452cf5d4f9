"""Finished layers of a pruning run, in `.NAME.pruning` beside the output: a killed command continues after them.

    request.json             what is pruned, how, and with which tokens; another request starts again
    layer-00003.safetensors  for each matrix `NAME.mask`, packed as in a mask file, and, if weights are updated,
                             `NAME.weight`; the metadata has `layer`, JSON: the rows of the report, and the seconds

A layer appears by rename. The inputs of the next layer are not saved: the windows are run through the finished layers
again, which gives them bit for bit. The folder is removed when the output is complete.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import steelyard
from steelyard.checkpoint.formats import CheckpointSource, safetensors
from steelyard.core import files
from steelyard.core.errors import RuntimeFailure, UserError
from steelyard.core.safe_parse import loads, read_json_object
from steelyard.sparsity.layerwise import LayerOnDevice, Task, layer_names
from steelyard.sparsity.mask_file import pack, unpack
from steelyard.sparsity.one_shot import Pruned

REQUEST = "request.json"


class FinishedLayers:
    """The finished layers of one request."""

    def __init__(self, destination: Path, source: CheckpointSource, task: Task, tokens_BL: Tensor | None) -> None:
        self.folder = destination.with_name(f".{destination.name}.pruning")
        self.source, self.task = source, task
        self.names = layer_names(task.names)
        self._identity = _identity(source, task, tokens_BL)

    def open(self) -> list[int]:
        """Prepare the folder; returns the layers that an earlier command with the same request finished."""
        request = self.folder / REQUEST
        try:
            is_same = request.is_file() and read_json_object(request) == self._identity
        except UserError:
            is_same = False
        if not is_same:
            self.remove()
            self.folder.mkdir(parents=True)
            files.write_json(request, self._identity)
        return list(itertools.takewhile(lambda number: self._read(number) is not None, self.names))

    def read(self, number: int, finished: Sequence[int]) -> LayerOnDevice | None:
        """A layer, if it is among the finished ones, which rank 0 has found."""
        if number not in finished:
            return None
        layer = self._read(number)
        if layer is None:
            raise RuntimeFailure(
                f"{self._path(number)} can be read on the first rank but not on this one",
                hint="put the output on a file system that all nodes share, or remove the folder to start again",
            )
        return layer

    def _read(self, number: int) -> LayerOnDevice | None:
        """A finished layer; None if there is none, or if its file is damaged."""
        path = self._path(number)
        if not path.is_file():
            return None
        try:
            about, tensors = loads(safetensors.metadata(path)["layer"]), safetensors.extents(path)
            matrices = {name: self._matrix(name, tensors) for name in self.names[number]}
            return LayerOnDevice(number, matrices, float(about["seconds"]), list(about["rows"]))
        except (UserError, KeyError, TypeError, ValueError, RuntimeError):
            return None

    def _matrix(self, name: str, tensors: dict[str, safetensors.Extent]) -> Pruned:
        dense = self.source.tensor(name)
        mask_OI = unpack(tensors[f"{name}.mask"].read(), tuple(dense.shape), self.task.pattern)
        weight_OI = tensors[f"{name}.weight"].read() if self.task.update else dense.masked_fill(~mask_OI, 0)
        return Pruned(mask_OI, weight_OI)

    def write(self, layer: LayerOnDevice) -> None:
        """Save a finished layer."""
        tensors = {f"{name}.mask": pack(matrix.mask_OI, self.task.pattern) for name, matrix in layer.matrices.items()}
        if self.task.update:
            tensors |= {f"{name}.weight": matrix.weight_OI for name, matrix in layer.matrices.items()}
        about = {"layer": json.dumps({"rows": layer.rows, "seconds": layer.seconds})}
        path = self._path(layer.number)
        temporary = files.temporary_beside(path)
        try:
            sizes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
            dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
            list(safetensors.write(temporary, sizes, dtypes, tensors.values(), about))
            files.sync_file(temporary)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove all of them."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _path(self, number: int) -> Path:
        return self.folder / f"layer-{number:05d}.safetensors"


def _identity(source: CheckpointSource, task: Task, tokens_BL: Tensor | None) -> dict[str, Any]:
    path = Path(source.path).resolve()
    found = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    return {
        "steelyard": steelyard.__version__,
        "checkpoint": str(path),
        "files": [[str(file), file.stat().st_size, file.stat().st_mtime_ns] for file in found],
        "method": task.method,
        "pattern": str(task.pattern),
        "update": task.update,
        "dense_inputs": task.dense_inputs,
        "names": task.names,
        "computed": f"{task.dtype} on {task.device.type}, torch {torch.__version__}",
        "tokens": None if tokens_BL is None else hashlib.sha256(tokens_BL.numpy().tobytes()).hexdigest(),
    }
