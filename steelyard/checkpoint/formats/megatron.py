"""Megatron's `torch` checkpoints of any tensor, pipeline and expert parallel size.

latest_checkpointed_iteration.txt             a number, or `release`
iter_0000001/mp_rank_{tp:02d}[_{pp:03d}][_{ep:03d}]/model_optim_rng.pt

Ranks of expert parallelism have copies of all tensors but those of experts, which they number from 0.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from steelyard.checkpoint.formats import hf_metadata, megatron_args, safe_unpickle
from steelyard.checkpoint.formats.huggingface import tokenizer_files, tokenizer_in
from steelyard.checkpoint.formats.key_mapping import Entry, megatron
from steelyard.checkpoint.formats.mapped_tensors import MappedSource, Store
from steelyard.checkpoint.formats.megatron_args import NOT_WEIGHTS, renamed
from steelyard.checkpoint.formats.megatron_experts import all_experts, experts_of
from steelyard.core.console import console
from steelyard.core.errors import UserError
from steelyard.core.recipe.model_section import ModelConfig

RANK = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")
FILES = ("model_optim_rng.pt", "model_rng.pt")
TOKENIZER = "tokenizer"
LAYER = re.compile(r"^(decoder\.layers\.)(\d+)(\..*)$")
# The tensors that MaskLLM saves with the weight of a linear layer: mask logits, candidate masks, and the mask.
MASKS = re.compile(r"\.(diff_mask\.gate|diff_mask\.mask_options|mask)$")
Pieces = dict[str, list[Tensor]]


def opened(path: Path) -> MappedSource | None:
    """The checkpoint of an iteration, or the newest in its parent folder."""
    folder, parent = megatron_args.iteration_folder(path)
    if not folder.is_dir():
        if folder == path:
            return None
        raise UserError(f"{folder} does not exist", where=str(path / megatron_args.LATEST))
    numbered = _files(folder)
    if not numbered:
        return None
    first = _state(numbered[min(numbered)])
    args = safe_unpickle.settings_of(first.get("args"))
    config = megatron_args.config_from_args(args, str(numbered[min(numbered)]))
    files = _by_rank(numbered, args)
    tensor, pipeline, expert = (1 + max(ranks) for ranks in zip(*files, strict=True))
    _refuse_missing(folder, files, (tensor, pipeline, expert))
    if config.blocks.has_experts and args.get("expert_tensor_parallel_size") not in (None, tensor):
        raise UserError(
            f"its experts are on {args['expert_tensor_parallel_size']} tensor ranks, other layers on {tensor}",
            where=str(folder), hint="save it as torch_dist, or with equal sizes",
        )  # fmt: skip
    states = {rank: _state(file) for rank, file in sorted(files.items())}
    version = first.get("checkpoint_version", 0)
    stages = [[[states[tp, pp, ep] for ep in range(expert)] for tp in range(tensor)] for pp in range(pipeline)]
    pieces = _joined_stages(stages, experts_of(config))
    store = Ranks({name: tensors for name, tensors in pieces.items() if not MASKS.search(name)}, config, version)
    store.masks = {name: tensors for name, tensors in pieces.items() if MASKS.search(name)}
    layout = {"tensor": tensor, "pipeline": pipeline, "checkpoint_version": version}
    if expert > 1:
        layout["expert"] = expert
    if store.masks:
        layout["masks"] = len({MASKS.sub("", name) for name in store.masks})
        console.say(f"{folder} has masks of MaskLLM besides the weights; eval and generate apply them")
    source = MappedSource("megatron", folder, config, store, megatron(config), layout)
    iteration = first.get("iteration")
    source.step = iteration if isinstance(iteration, int) else None
    add_companions(source, args, parent)
    return source


def add_companions(source: MappedSource, args: dict[str, Any], parent: Path) -> None:
    """Add the sequence length, and the metadata and tokenizer that Steelyard writes next to the weights."""
    source.hf_metadata = hf_metadata.read(parent)
    positions = args.get("max_position_embeddings")
    if type(positions) is int and positions > 0:
        source.hf_metadata["positions"] = positions
    source.tokenizer_files = tokenizer_files(parent / TOKENIZER)
    source.tokenizer = tokenizer_in(parent / TOKENIZER)


def _files(folder: Path) -> dict[tuple[int, ...], Path]:
    """The file of each rank, by the numbers in the name of its folder."""
    found = {}
    for inner in folder.iterdir():
        match = RANK.fullmatch(inner.name)
        file = next((inner / name for name in FILES if (inner / name).is_file()), None)
        if match and file:
            found[tuple(int(number) for number in match.groups() if number)] = file
    return found


def _by_rank(files: dict[tuple[int, ...], Path], args: dict[str, Any]) -> dict[tuple[int, int, int], Path]:
    """The file of each tensor, pipeline and expert rank. The args say whether a second number is an expert rank."""
    pipeline, expert = (args.get(f"{axis}_model_parallel_size") or 1 for axis in ("pipeline", "expert"))
    is_expert = pipeline == 1 and expert != 1
    found = {}
    for (tensor, *others), file in files.items():
        numbers = [0, *others] if is_expert and len(others) == 1 else [*others, 0, 0]
        found[tensor, numbers[0], numbers[1]] = file
    return found


def _refuse_missing(folder: Path, files: dict[tuple[int, int, int], Path], sizes: tuple[int, int, int]) -> None:
    ranks = ((tp, pp, ep) for ep in range(sizes[2]) for pp in range(sizes[1]) for tp in range(sizes[0]))
    missing = next((rank for rank in ranks if rank not in files), None)
    if missing is not None:
        tensor, pipeline, number = missing
        expert = f", expert rank {number}" if sizes[2] > 1 else ""
        raise UserError(f"{folder} has no file of tensor rank {tensor}, pipeline rank {pipeline}{expert}")


def _state(file: Path) -> dict[str, Any]:
    state = safe_unpickle.load(file)
    if not isinstance(state, dict) or not any(re.fullmatch(r"model\d*", str(key)) for key in state):
        raise UserError("it contains no model", where=str(file))
    return state


def _joined_stages(stages: list[list[list[dict[str, Any]]]], experts: int) -> Pieces:
    """The shards of every tensor, by its name in the whole model. The layers of a stage are numbered from 0.

    `stages` has the states by pipeline, tensor and expert rank.
    """
    chunks = sorted(
        {key for key in stages[0][0][0] if re.fullmatch(r"model\d*", str(key))}, key=lambda key: (len(key), key)
    )
    pieces: Pieces = {}
    first_layer = 0
    for chunk in chunks:  # With several chunks per stage, the first chunks of all stages come first.
        for ranks in stages:
            named = [all_experts([weights(state.get(chunk, {})) for state in rank], experts) for rank in ranks]
            layers = 0
            for name in named[0]:
                match = LAYER.match(name)
                layers = max(layers, int(match[2]) + 1) if match else layers
                full_name = f"{match[1]}{int(match[2]) + first_layer}{match[3]}" if match else name
                if any(name not in other for other in named):
                    raise UserError(f"not every tensor rank has {name}")
                pieces[full_name] = [other[name] for other in named]
            first_layer += layers
    return pieces


def weights(model: Any) -> dict[str, Tensor]:
    """The weights of one saved model, by their current names."""
    found = {renamed(name): tensor for name, tensor in safe_unpickle.tensors_in(model).items()}
    return {name: tensor for name, tensor in found.items() if not NOT_WEIGHTS.search(name)}


class Ranks(Store):
    """Tensors as shards of the tensor ranks."""

    def __init__(self, pieces: Pieces, config: ModelConfig, version: float) -> None:
        if config.tied:
            pieces.pop("output_layer.weight", None)
        self.pieces, self.config, self.version = pieces, config, version
        self.masks: Pieces = {}
        """MaskLLM's tensors, which are not weights: `sparsity/maskllm.py` reads them."""
        self.entries = {entry.name: entry for entry in megatron(config)}

    def sizes(self) -> dict[str, tuple[int, ...]]:
        sizes = {}
        for name, pieces in self.pieces.items():
            size = list(pieces[0].shape)
            shard_dim = self.entries[name].shard_dim if name in self.entries else None
            if shard_dim is not None and shard_dim < len(size):
                size[shard_dim] = sum(piece.shape[shard_dim] for piece in pieces)
            sizes[name] = tuple(size)
        return sizes

    def dtypes(self) -> set[torch.dtype]:
        return {piece.dtype for pieces in self.pieces.values() for piece in pieces}

    def read(self, entry: Entry) -> Tensor:
        return self.joined(entry, self.pieces[entry.name])

    def joined(self, entry: Entry, pieces: list[Tensor]) -> Tensor:
        """Join shards that are laid out like the tensor of an entry; they may have more dimensions."""
        if entry.shard_dim is None:
            return pieces[0]
        if entry.join == "groups" and self.version < 2:
            pieces = [self._in_groups(piece) for piece in pieces]
        if len(entry.ours) == 2:  # Each rank has its part of the gate, then its part of the up projection.
            halves = [piece.chunk(2) for piece in pieces]
            return torch.cat([gate for gate, _ in halves] + [up for _, up in halves])
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=entry.shard_dim)

    def _in_groups(self, piece: Tensor) -> Tensor:
        """Reorder to groups. Before version 2 each head has its own key and value, apart (0) or innermost (1)."""
        head = self.config.hidden // self.config.heads
        if self.version >= 1:
            in_order: Tensor = piece.unflatten(0, (-1, head, 3)).transpose(1, 2)
        else:
            in_order = piece.unflatten(0, (3, -1, head)).transpose(0, 1)
        return in_order.flatten(0, 2)
