"""Load or expand a folder of compressed 2:4 weights with transformers, torch and safetensors only.

`export-sparse` copies this file into each folder, so it imports nothing of Steelyard:

    AutoModelForCausalLM.from_pretrained("folder", trust_remote_code=True)
    python folder/expand_sparse.py dense        # a plain Hugging Face folder with the zeros

A matrix is stored as `values`, the two weights that are kept of every four, and `indices`, two bits for each: its
place in the group, the first in the lower bits, two groups to a byte. In version 2 the values are 8-bit (fp8 e4m3 or
int8), and are multiplied by `scales`, one for each row. `sparse_names.json` lists the tensors of transformers and the
stored tensors that each consists of.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

NAMES = "sparse_names.json"
STATED = "sparse_format"  # in config.json
FORMATS = {("steelyard-2:4", "1", None), ("steelyard-2:4", "2", "fp8"), ("steelyard-2:4", "2", "int8")}
SHARD_BYTES = 5_000_000_000


class SparseForCausalLM:
    """The class that `auto_map` in config.json names; it returns a model of the architecture in config.json."""

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = None) -> None:
        """transformers calls this; there is nothing to register, because what is saved is dense."""

    @classmethod
    def from_pretrained(cls, path: str, *_: Any, config: Any = None, **options: Any) -> Any:
        """A dense model with the expanded weights."""
        import transformers

        folder = Path(path)
        if not folder.is_dir():
            from huggingface_hub import snapshot_download

            folder = Path(snapshot_download(path))
        if config is None:
            config = transformers.AutoConfig.from_pretrained(folder)
        config.auto_map = None  # What is saved from the model is dense.
        vars(config).pop(STATED, None)
        model = getattr(transformers, config.architectures[0])
        given = {key: options[key] for key in ("dtype", "torch_dtype", "device_map") if options.get(key) is not None}
        if not given.keys() & {"dtype", "torch_dtype"}:
            given["dtype"] = config.dtype or "auto"
        return model.from_pretrained(None, config=config, state_dict=dict(expanded_tensors(folder)), **given)


def expanded_tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """The dense tensors by their names in transformers, in the dtype of config.json."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    dtype: torch.dtype = getattr(torch, config["torch_dtype"])
    files: dict[str, Any] = {}
    for file in sorted(folder.glob("sparse*.safetensors")):
        opened: Any = safe_open(file, "pt")
        about = opened.metadata()
        if (about.get("format"), about.get("version"), about.get("values")) not in FORMATS:
            raise ValueError(f"{file}: this loader does not know {about}")
        files |= dict.fromkeys(opened.keys(), opened)

    def stored(name: str) -> Tensor:
        if name in files:
            whole: Tensor = files[name].get_tensor(name)
            return whole
        stem = name.removesuffix(".weight")
        values, indices = (files[f"{stem}.{part}"].get_tensor(f"{stem}.{part}") for part in ("values", "indices"))
        scales = f"{stem}.scales"
        if scales in files:
            values = (values.float() * files[scales].get_tensor(scales)[..., None]).to(dtype)
        return expanded(values, indices)

    for entry in json.loads((folder / NAMES).read_text(encoding="utf-8")):
        parts = [stored(name) for name in entry["stored"]]
        if entry["expert"] is not None:
            parts = [part[entry["expert"]] for part in parts]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        yield entry["name"], (whole.t() if entry["transposed"] and whole.ndim == 2 else whole).contiguous()


def expanded(values: Tensor, indices: Tensor) -> Tensor:
    """The dense matrix of values (..., in / 2) and indices (..., in / 8)."""
    groups = values.shape[-1] // 2
    codes = torch.stack([indices & 15, indices >> 4], dim=-1).flatten(-2)[..., :groups]
    places = torch.stack([codes & 3, codes >> 2], dim=-1).long()
    whole = values.new_zeros(*values.shape[:-1], groups, 4)
    return whole.scatter_(-1, places, values.unflatten(-1, (groups, 2))).flatten(-2)


def write_dense(folder: Path, destination: Path) -> None:
    """Write a plain Hugging Face folder with the zeros."""
    destination.mkdir()
    for file in folder.iterdir():
        own = file.name in (Path(__file__).name, NAMES, "config.json", "SHA256SUMS")
        if file.is_file() and not own and not file.match("sparse*.safetensors"):
            shutil.copy(file, destination)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    for key in ("auto_map", STATED):
        config.pop(key, None)
    shards: list[dict[str, Tensor]] = [{}]
    filled = 0
    weight_map: dict[str, int] = {}
    for name, tensor in expanded_tensors(folder):
        filled += tensor.nbytes
        if shards[-1] and filled > SHARD_BYTES:
            _save(shards, destination)
            filled = tensor.nbytes
        shards[-1][name] = tensor
        weight_map[name] = len(shards)
    _save(shards, destination)
    index = {"metadata": {}, "weight_map": {name: _file(number) for name, number in weight_map.items()}}
    (destination / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")
    (destination / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


def _save(shards: list[dict[str, Tensor]], destination: Path) -> None:
    """Save the last shard, release it, and begin another."""
    save_file(shards[-1], destination / _file(len(shards)), {"format": "pt"})
    shards[-1] = {}
    shards.append({})


def _file(number: int) -> str:
    return f"model-{number:05d}.safetensors"


if __name__ == "__main__":
    write_dense(Path(__file__).resolve().parent, Path(sys.argv[1]))
