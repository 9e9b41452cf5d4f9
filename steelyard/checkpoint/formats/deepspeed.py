"""Megatron-DeepSpeed's `global_stepN` folders.

global_step1000/mp_rank_{tp:02d}_model_states.pt      args, and without a pipeline the whole model
global_step1000/layer_{nn}-model_{tp:02d}-model_states.pt   one file for each module of the pipeline: the embedding,
                                                      the layers in order, the final norm, and an untied head
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from torch import Tensor

from steelyard.checkpoint.formats import megatron_args, safe_unpickle
from steelyard.checkpoint.formats.key_mapping import megatron
from steelyard.checkpoint.formats.mapped_tensors import MappedSource
from steelyard.checkpoint.formats.megatron import Pieces, Ranks, add_companions, weights
from steelyard.checkpoint.formats.megatron_args import NOT_WEIGHTS
from steelyard.core.errors import UserError

LATEST = "latest"
LAYER_FILE = re.compile(r"layer_(\d+)-model_(\d+)-model_states\.pt")
RANK_FILE = re.compile(r"mp_rank_(\d+)_model_states\.pt")


def opened(path: Path) -> MappedSource | None:
    """The checkpoint of a step, or the newest in its parent folder."""
    folder = _step_folder(path)
    if not folder.is_dir():
        return None
    ranks = _numbered(folder, RANK_FILE)
    if not ranks:
        return None
    states = [safe_unpickle.load(file) for _, file in sorted(ranks.items())]
    args = safe_unpickle.settings_of(states[0].get("args") if isinstance(states[0], dict) else None)
    config = megatron_args.config_from_args(args, str(folder))
    layers = _numbered(folder, LAYER_FILE)
    shards = _from_layers(layers) if layers else _from_ranks(states)
    store = Ranks(shards, config, states[0].get("checkpoint_version", 3.0))
    tensor = len({number[1] for number in layers}) or len(states)
    layout = {"tensor": tensor, "files": len(layers) or len(states)}
    source = MappedSource("deepspeed", folder, config, store, megatron(config), layout)
    match = re.fullmatch(r"global_step(\d+)", folder.name)
    source.step = int(match[1]) if match else None
    add_companions(source, args, folder.parent)
    return source


def _step_folder(path: Path) -> Path:
    latest = path / LATEST
    if not latest.is_file():
        return path
    name = latest.read_text(encoding="utf-8", errors="replace").strip()
    if not re.fullmatch(r"global_step\d+", name):
        return path
    return path / name


def _numbered(folder: Path, pattern: re.Pattern[str]) -> dict[tuple[int, ...], Path]:
    matches = ((pattern.fullmatch(file.name), file) for file in folder.iterdir())
    return {tuple(int(number) for number in match.groups()): file for match, file in matches if match}


def _from_ranks(states: list[Any]) -> Pieces:
    """The shards of a model without a pipeline: the file of a tensor rank has all modules."""
    named = [weights(state.get("module") or state.get("model")) for state in states]
    return {name: [other[name] for other in named] for name in named[0]}


def _from_layers(files: dict[tuple[int, ...], Path]) -> Pieces:
    """The shards of a pipeline, one file per module; the tensor names show which module it is."""
    shards: Pieces = {}
    layer = 0
    for number in sorted({number for number, _ in files}):
        ranks = [safe_unpickle.tensors_in(safe_unpickle.load(files[key])) for key in sorted(files) if key[0] == number]
        prefix = _prefix_of(ranks[0], layer)
        if prefix is None:
            raise UserError(
                f"layer_{number:02d} has {', '.join(list(ranks[0])[:3])}, which is not a module of GPT or Llama"
            )
        layer += prefix.startswith("decoder.layers.")
        for name in ranks[0]:
            name_now = megatron_args.renamed(f"{prefix}{name}")
            if not NOT_WEIGHTS.search(name_now):
                shards.setdefault(
                    name_now, [rank[name] for rank in ranks]
                )  # A tied embedding may appear again at the end.
    return shards


def _prefix_of(tensors: dict[str, Tensor], layer: int) -> str | None:
    """The name prefix of the tensors in a file."""
    if any(name.startswith("word_embeddings") for name in tensors):
        return "embedding."
    if any("attention" in name for name in tensors):
        return f"decoder.layers.{layer}."
    if tensors and tensors.keys() <= {"weight", "bias"}:
        return "decoder.final_layernorm." if next(iter(tensors.values())).ndim == 1 else "output_layer."
    if any(name.startswith(("lm_head.", "output_layer.")) for name in tensors):
        return ""
    return None
