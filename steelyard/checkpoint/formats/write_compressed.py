"""Write compressed 2:4 weights, and beside them what transformers needs to load them without Steelyard.

`compressed_tensors.py` specifies the layout. `expand_sparse.py` is copied into the folder, and `auto_map` in
config.json names its class; `sparse_names.json` maps the tensors of transformers to ours.

The source has a list of `compressed` matrices, and returns each as values and indices, with a `value_format` of 8 bits
also as scales.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from steelyard.checkpoint.formats import compressed_tensors, expand_sparse, safetensors
from steelyard.checkpoint.formats.key_mapping import hugging_face
from steelyard.checkpoint.formats.row_scales import DTYPES
from steelyard.checkpoint.formats.source import CheckpointSource
from steelyard.core import files

if TYPE_CHECKING:
    from steelyard.checkpoint.formats.write import Supply

AUTO_MAP = {"AutoModelForCausalLM": "expand_sparse.SparseForCausalLM"}


def write(supply: Supply, folder: Path, shard_bytes: int) -> None:
    """Write a source, in several files if it is large."""
    compressed, kind = set(getattr(supply.source, "compressed", ())), getattr(supply.source, "value_format", None)
    sizes: dict[str, tuple[int, ...]] = {}
    dtypes: dict[str, torch.dtype] = {}
    for name, size in supply.sizes.items():
        if name in compressed:
            values, indices = compressed_tensors.parts_of(name)
            *rows, inputs = size
            sizes |= {values: (*rows, inputs // 2), indices: (*rows, compressed_tensors.indices_of_row(inputs))}
            dtypes |= {values: supply.dtype, indices: torch.uint8}
            if kind is not None:
                scales = compressed_tensors.scales_of(name)
                sizes[scales] = tuple(rows)
                dtypes |= {values: DTYPES[kind], scales: torch.float32}
        else:
            sizes[name], dtypes[name] = size, supply.dtype
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        filled += math.prod(size) * dtypes[name].itemsize
        if shards[-1] and filled > shard_bytes:
            shards.append([])
            filled = math.prod(size) * dtypes[name].itemsize
        shards[-1].append(name)
    about = compressed_tensors.declaration(kind)
    for number, shard in enumerate(shards, start=1):
        file = "sparse.safetensors" if len(shards) == 1 else f"sparse-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = (supply.tensor(name, dtypes[name])[: sizes[name][0]] for name in shard)
        for size_written in safetensors.write(
            folder / file, {name: sizes[name] for name in shard}, dtypes, tensors, about
        ):
            supply.progress.advance(size_written)
    _write_loader(supply, folder)


def config_keys(source: CheckpointSource) -> dict[str, Any]:
    """The additional keys of config.json: the loader's class, and the format of the weights."""
    stated = compressed_tensors.declaration(getattr(source, "value_format", None))
    return {"auto_map": AUTO_MAP, compressed_tensors.STATED: stated}


def _write_loader(supply: Supply, folder: Path) -> None:
    source = Path(expand_sparse.__file__)
    files.write_text(folder / source.name, source.read_text(encoding="utf-8"))
    names = [
        {"name": entry.name, "stored": entry.ours, "transposed": entry.join == "turned", "expert": entry.expert}
        for entry in hugging_face(supply.config)
    ]
    files.write_json(folder / expand_sparse.NAMES, names)
