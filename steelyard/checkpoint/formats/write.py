"""Writing a source as another format: tensor by tensor, so that memory holds little more than the largest one.

Everything is written into a folder that takes its name at the end. All tensors get one dtype: the one asked for, or
the source's, which holds all of them exactly.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from steelyard.checkpoint import folder as folders
from steelyard.checkpoint.formats import compressed, safetensors, write_megatron
from steelyard.checkpoint.formats import config as configs
from steelyard.checkpoint.formats.entries import Entry, hugging_face, joined, theirs_size
from steelyard.checkpoint.formats.mapped import TABLES
from steelyard.checkpoint.formats.source import Source, check, expected_sizes
from steelyard.checkpoint.formats.steelyard import PREFIX, TOKENIZER
from steelyard.checkpoint.formats.write_megatron import Layout
from steelyard.checkpoint.pieces import Promised
from steelyard.core import files
from steelyard.core.console import Progress, console
from steelyard.core.errors import UserError
from steelyard.text import tokenizer as tokenizers

TARGETS = ("hf", "compressed", "megatron", "megatron-dist", "steelyard")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SHARD_BYTES = 5_000_000_000
WHOLE = Layout()


@dataclass(frozen=True)
class Target:
    """What to write. The layout matters to Megatron alone."""

    to: str
    layout: Layout = WHOLE
    dtype: torch.dtype | None = None
    shard_bytes: int = SHARD_BYTES
    tokenizer: str | None = None


def convert(source: Source, destination: Path, target: Target) -> dict[str, Any]:
    """Write a checkpoint and say what was written."""
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise UserError(f"{destination} is there already", mend="name a new folder")
    if destination.is_dir():
        destination.rmdir()
    check(source, source.shape)
    dtype = target.dtype or source.dtype
    if target.to != "megatron" and target.layout != WHOLE:
        raise UserError(
            f"{target.to} checkpoints are not divided among ranks", mend="leave out --tensor and --pipeline"
        )
    sizes = expected_sizes(source.shape)
    total = sum(math.prod(size) for size in sizes.values()) * dtype.itemsize
    with files.atomic_folder(destination) as folder, console.progress(f"write {target.to}", total, "bytes") as progress:
        supply = Supply(source, dtype, progress)
        if target.to == "hf":
            _write_hf(supply, folder, target.shard_bytes)
            _add_tokenizer(source, folder, target.tokenizer)
            _write_configs(source, folder, dtype)
        elif target.to == "compressed":
            _write_compressed(supply, folder, target.shard_bytes)
            _add_tokenizer(source, folder, target.tokenizer)
            _write_configs(source, folder, dtype)
        elif target.to == "steelyard":
            _write_steelyard(supply, folder)
            _add_tokenizer(source, folder / TOKENIZER, target.tokenizer)
        else:
            write = write_megatron.torch_files if target.to == "megatron" else write_megatron.torch_dist
            write(supply, folder, target.layout)
            _add_tokenizer(source, folder / TOKENIZER, target.tokenizer)
    return {"path": str(destination), "format": target.to, "dtype": str(dtype).removeprefix("torch."), "bytes": total}


class Supply:
    """Their tensors, made from a source's."""

    def __init__(self, source: Source, dtype: torch.dtype, progress: Progress) -> None:
        self.source, self.shape, self.dtype, self.progress = source, source.shape, dtype, progress
        self.sizes = expected_sizes(source.shape)
        # Padding of the vocabulary is ours alone.
        for name in TABLES:
            if name in self.sizes:
                self.sizes[name] = (self.shape.vocab, *self.sizes[name][1:])

    def size(self, entry: Entry) -> tuple[int, ...]:
        """The size of one of their tensors."""
        return theirs_size(entry, self.sizes)

    def parts(self, entry: Entry) -> list[Tensor]:
        """Our tensors that one of theirs is made of."""
        found = []
        for name in entry.ours:
            tensor = self.source.tensor(name)
            found.append((tensor[: self.shape.vocab] if name in TABLES else tensor).to(self.dtype))
            self.progress.advance(tensor.numel() * self.dtype.itemsize)
        return found

    def whole(self, entry: Entry) -> Tensor:
        """One of their tensors."""
        return joined(entry, self.parts(entry), self.shape)


def _write_hf(supply: Supply, folder: Path, shard_bytes: int) -> None:
    entries = hugging_face(supply.shape)
    shards = list(_shards(entries, supply, shard_bytes))
    place: dict[str, str] = {}
    total = 0
    for number, shard in enumerate(shards, start=1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        sizes = {entry.name: supply.size(entry) for entry in shard}
        total += sum(safetensors.write(folder / file, sizes, supply.dtype, map(supply.whole, shard)))
        place |= {entry.name: file for entry in shard}
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": place}
        files.write_json(folder / "model.safetensors.index.json", index)


def _shards(entries: Iterable[Entry], supply: Supply, limit: int) -> Iterator[list[Entry]]:
    shard: list[Entry] = []
    size = 0
    for entry in entries:
        more = math.prod(supply.size(entry)) * supply.dtype.itemsize
        if shard and size + more > limit:
            yield shard
            shard, size = [], 0
        shard.append(entry)
        size += more
    yield shard


def _write_compressed(supply: Supply, folder: Path, shard_bytes: int) -> None:
    """A source that names its `compressed` matrices, each as the values and indices that it gives."""
    whole = set(getattr(supply.source, "compressed", ()))
    sizes: dict[str, tuple[int, ...]] = {}
    dtypes: dict[str, torch.dtype] = {}
    for name, size in supply.sizes.items():
        if name in whole:
            values, indices = compressed.parts_of(name)
            sizes |= {values: (size[0], size[1] // 2), indices: (size[0], compressed.indices_of_row(size[1]))}
            dtypes |= {values: supply.dtype, indices: torch.uint8}
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
    about = {"format": compressed.FORMAT, "version": compressed.VERSION}
    for number, shard in enumerate(shards, start=1):
        file = "sparse.safetensors" if len(shards) == 1 else f"sparse-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = (supply.source.tensor(name)[: sizes[name][0]] for name in shard)
        for size_written in safetensors.write(
            folder / file, {name: sizes[name] for name in shard}, dtypes, tensors, about
        ):
            supply.progress.advance(size_written)


def _write_configs(source: Source, folder: Path, dtype: torch.dtype) -> None:
    extra = dict(source.extra)
    if "eos_token_id" not in extra and any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model")):
        extra["eos_token_id"] = tokenizers.load(folder).end_id
    files.write_json(folder / "config.json", configs.config_of(source.shape, dtype, extra))
    special = {key: extra[key] for key in configs.SPECIAL if extra.get(key) is not None}
    generation = extra.get("generation_config") or {"_from_model_config": True, **special}
    files.write_json(folder / "generation_config.json", generation)


def _write_steelyard(supply: Supply, folder: Path) -> None:
    source, sizes = supply.source, expected_sizes(supply.shape)

    def made(name: str) -> Promised:
        def make(_: int) -> Tensor:
            supply.progress.advance(math.prod(sizes[name]) * supply.dtype.itemsize)
            return source.tensor(name)

        return Promised(make, sizes[name], supply.dtype)

    state = {
        "step": source.step or 0,
        "model": supply.shape.model_dump(exclude_none=True),
        "extra": source.extra,
    }
    folders.fill(folder, {f"{PREFIX}{name}": made(name) for name in source.names()}, state)


def _add_tokenizer(source: Source, folder: Path, named: str | None) -> None:
    """Put the tokenizer beside the weights: the source's own files, or one of any kind as Hugging Face's."""
    folder.mkdir(exist_ok=True)
    if named is None and source.tokenizer_files:
        for file in source.tokenizer_files:
            (folder / file.name).write_bytes(file.read_bytes())
    elif named is not None or source.tokenizer is not None:
        found = tokenizers.load(named) if named is not None else source.load_tokenizer()
        if found.vocab_size > source.shape.vocab:
            raise UserError(f"the tokenizer has {found.vocab_size} ids, and the model only {source.shape.vocab}")
        found.save(folder)
    else:
        console.warn(f"{source.path} comes without a tokenizer, so none is written; --tokenizer names one")
    if not any(folder.iterdir()):
        folder.rmdir()
