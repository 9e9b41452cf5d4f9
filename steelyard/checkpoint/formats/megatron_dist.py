"""Megatron's `torch_dist` checkpoints, which do not depend on the layout: torch.distributed.checkpoint, layers stacked.

iter_0000001/.metadata, __<rank>_<n>.distcp   tensors; those of layers have a leading dimension of layers
iter_0000001/common.pt                         args and counters
iter_0000001/metadata.json                     {"sharded_backend": "torch_dist", ...}
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from steelyard.checkpoint import folder as folders
from steelyard.checkpoint.folder import Checkpoint
from steelyard.checkpoint.formats import megatron_args, safe_unpickle
from steelyard.checkpoint.formats.key_mapping import Entry, megatron
from steelyard.checkpoint.formats.mapped_tensors import MappedSource, Store
from steelyard.checkpoint.formats.megatron import add_companions
from steelyard.checkpoint.formats.megatron_args import NOT_WEIGHTS, renamed
from steelyard.checkpoint.sharded_tensor import TensorShard
from steelyard.core.errors import UserError
from steelyard.core.files import inside
from steelyard.core.safe_parse import read_json_object

STACKED = re.compile(r"^decoder\.layers\.(?!\d)")
EXPERTS = ".mlp.experts.experts."


def opened(path: Path) -> MappedSource | None:
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
    source = MappedSource(
        "megatron-dist", folder, config, StackedLayers(folder, config.tied), megatron(config), _layout(folder)
    )
    iteration = common.get("iteration")
    source.step = iteration if isinstance(iteration, int) else None
    add_companions(source, args, parent)
    return source


def _layout(folder: Path) -> dict[str, int]:
    return {"files": len(list(folder.glob("*.distcp")))}


class StackedLayers(Store):
    """Tensors of torch.distributed.checkpoint, with those of all layers, and of all experts, stacked into one."""

    def __init__(self, folder: Path, tied: bool) -> None:
        self.saved = Checkpoint(folder, {})
        self._places: dict[str, tuple[str, tuple[int, ...]]] = {}
        """The stack that has a tensor, and its number in each stacked dimension."""
        self._kinds = {}
        for name, (size, dtype) in self.saved.tensors().items():
            name_now = renamed(name)
            if NOT_WEIGHTS.search(name_now) or (tied and name_now == "output_layer.weight"):
                continue
            self._kinds[name] = size, dtype
            for inner, place in _unstacked(name_now, size):
                self._places[inner] = name, place

    def sizes(self) -> dict[str, tuple[int, ...]]:
        return {name: self._kinds[theirs][0][len(place) :] for name, (theirs, place) in self._places.items()}

    def dtypes(self) -> set[torch.dtype]:
        return {dtype for _, dtype in self._kinds.values()}

    def read(self, entry: Entry) -> Tensor:
        name, place = self._places[entry.name]
        size, dtype = self._kinds[name]
        tensor = torch.empty((*[1] * len(place), *size[len(place) :]), dtype=dtype)
        offset = (*place, *[0] * (len(size) - len(place)))
        folders.load(self.saved, {name: TensorShard(tensor, size, offset)})
        return tensor.reshape(size[len(place) :])


def _unstacked(name: str, size: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The tensors in a stack: name, and number in each stacked dimension. Counts in a damaged file are limited."""
    is_stacked, has_experts = bool(STACKED.match(name) and size), EXPERTS in name
    stacked = size[: is_stacked + has_experts]
    for place in itertools.product(*(range(min(count, math.prod(size))) for count in stacked)):
        inner = STACKED.sub(f"decoder.layers.{place[0]}.", name) if is_stacked else name
        if has_experts and len(place) == len(stacked) == is_stacked + has_experts:
            inner = inner.replace(EXPERTS, f".mlp.experts.local_experts.{place[-1]}.")
        yield inner, place
