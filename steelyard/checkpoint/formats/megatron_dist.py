"""Megatron's `torch_dist` checkpoints, which do not depend on the layout: torch.distributed.checkpoint, layers stacked.

iter_0000001/.metadata, __<rank>_<n>.distcp   tensors; those of layers have a leading dimension of layers
iter_0000001/common.pt                         args and counters
iter_0000001/metadata.json                     {"sharded_backend": "torch_dist", ...}
"""

from __future__ import annotations

import math
import re
from pathlib import Path

import torch
from torch import Tensor

from steelyard.checkpoint import folder as folders
from steelyard.checkpoint.folder import Checkpoint
from steelyard.checkpoint.formats import megatron_args, safe_unpickle
from steelyard.checkpoint.formats.key_mapping import Entry, megatron
from steelyard.checkpoint.formats.mapped_tensors import Mapped, Store
from steelyard.checkpoint.formats.megatron import add_companions
from steelyard.checkpoint.formats.megatron_args import NOT_WEIGHTS, renamed
from steelyard.checkpoint.sharded_tensor import TensorShard
from steelyard.core.errors import UserError
from steelyard.core.files import inside
from steelyard.core.safe_parse import read_json_object

STACKED = re.compile(r"^decoder\.layers\.(?!\d)")


def opened(path: Path) -> Mapped | None:
    """The checkpoint of an iteration, or the newest in its parent folder."""
    folder, parent = megatron_args.iteration_folder(path)
    if not (folder / ".metadata").is_file() or not (folder / "metadata.json").is_file():
        return None
    backend = read_json_object(inside(folder / "metadata.json")).get("sharded_backend")
    if backend != "torch_dist":
        raise UserError(f"{folder} was written by the backend {backend}", hint="only torch_dist is supported")
    common = safe_unpickle.load(folder / "common.pt") if (folder / "common.pt").is_file() else {}
    args = safe_unpickle.settings_of(common.get("args") if isinstance(common, dict) else None)
    config = megatron_args.config_from_args(args, str(folder / "common.pt"))
    source = Mapped("megatron-dist", folder, config, Stacked(folder, config.tied), megatron(config), _layout(folder))
    iteration = common.get("iteration")
    source.step = iteration if isinstance(iteration, int) else None
    add_companions(source, args, parent)
    return source


def _layout(folder: Path) -> dict[str, int]:
    return {"files": len(list(folder.glob("*.distcp")))}


class Stacked(Store):
    """Tensors of torch.distributed.checkpoint, with those of all layers stacked into one."""

    def __init__(self, folder: Path, tied: bool) -> None:
        self.saved = Checkpoint(folder, {})
        self._places: dict[str, tuple[str, int | None]] = {}
        self._kinds = {}
        for name, (size, dtype) in self.saved.tensors().items():
            name_now = renamed(name)
            if NOT_WEIGHTS.search(name_now) or (tied and name_now == "output_layer.weight"):
                continue
            self._kinds[name] = size, dtype
            if STACKED.match(name_now) and size:
                for layer in range(min(size[0], math.prod(size))):
                    self._places[STACKED.sub(f"decoder.layers.{layer}.", name_now)] = name, layer
            else:
                self._places[name_now] = name, None

    def sizes(self) -> dict[str, tuple[int, ...]]:
        return {
            name: self._kinds[theirs][0] if layer is None else self._kinds[theirs][0][1:]
            for name, (theirs, layer) in self._places.items()
        }

    def dtypes(self) -> set[torch.dtype]:
        return {dtype for _, dtype in self._kinds.values()}

    def read(self, entry: Entry) -> Tensor:
        name, layer = self._places[entry.name]
        size, dtype = self._kinds[name]
        if layer is None:
            tensor = torch.empty(size, dtype=dtype)
            folders.load(self.saved, {name: tensor})
            return tensor
        tensor = torch.empty((1, *size[1:]), dtype=dtype)
        folders.load(self.saved, {name: TensorShard(tensor, size, (layer, *[0] * (len(size) - 1)))})
        return tensor[0]
