"""Convert a checkpoint source to another format, tensor by tensor, so that memory holds little more than the largest.

Everything is written to a temporary folder, which is renamed at the end. All tensors get one dtype: the requested one,
or that of the source, which represents all tensors exactly.
"""

from __future__ import annotations

import contextlib
import errno
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from steelyard.checkpoint import folder as folders
from steelyard.checkpoint.finite import refuse_nonfinite
from steelyard.checkpoint.formats import hf_config as configs
from steelyard.checkpoint.formats import hf_metadata, safetensors, write_compressed, write_gguf, write_megatron
from steelyard.checkpoint.formats.key_mapping import Entry, hugging_face, joined, theirs_size
from steelyard.checkpoint.formats.megatron_args import refuse_to_write
from steelyard.checkpoint.formats.megatron_layout import MegatronLayout
from steelyard.checkpoint.formats.native import PREFIX, TOKENIZER
from steelyard.checkpoint.formats.source import TABLES, CheckpointSource, check, expected_sizes
from steelyard.checkpoint.sharded_tensor import LazyTensor
from steelyard.core import files, sha256sums, units
from steelyard.core.console import ProgressBar, console
from steelyard.core.errors import RuntimeFailure, UserError
from steelyard.text import tokenizer as tokenizers
from steelyard.text.tokenizer import Tokenizer

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
SHARD_BYTES = 5_000_000_000
WHOLE = MegatronLayout()


@dataclass(frozen=True)
class Target:
    """The format and options of a conversion. The layout applies only to Megatron, the quantization to GGUF."""

    to: str
    layout: MegatronLayout = WHOLE
    dtype: torch.dtype | None = None
    shard_bytes: int = SHARD_BYTES
    tokenizer: str | None = None
    quantization: str | None = None


def convert(
    source: CheckpointSource, destination: Path, target: Target, complete: Callable[[Path], None] | None = None
) -> dict[str, Any]:
    """Write a checkpoint after checking that it can be written; `complete` may change the folder before checksums."""
    refuse_destination(destination, is_file=target.to == "gguf")
    check(source, source.config)
    dtype = target.dtype or source.dtype
    if target.quantization is not None and target.to != "gguf":
        raise UserError(f"{target.to} checkpoints are not quantized", hint="remove --dtype, or convert --to gguf")
    if target.to != "megatron" and target.layout != WHOLE:
        raise UserError(f"{target.to} checkpoints are not sharded by rank", hint="remove --tensor and --pipeline")
    if target.to.startswith("megatron"):
        refuse_to_write(source.config)
    if target.to == "gguf":
        write_gguf.refuse(source.config, destination)
    if source.remark is not None:
        console.warn(source.remark)
    if target.to == "gguf":
        return _write_gguf(source, destination, target)
    supply = Supply(source, dtype)
    needed = write_megatron.bytes_of(supply, target.layout) if target.to == "megatron" else supply.bytes
    tokenizer = _tokenizer(source, target.tokenizer)
    metadata = _metadata(source, tokenizer, target.tokenizer is not None)
    if target.to in ("hf", "compressed"):  # What transformers cannot express is an error now, not after all weights.
        configs.config_to_hf(source.config, dtype, metadata)
    with _disk_space(destination, needed), files.atomic_folder(destination) as folder:
        with console.progress(f"write {target.to}", supply.bytes, "bytes") as supply.progress:
            if target.to == "hf":
                _write_hf(supply, folder, target.shard_bytes)
                _write_configs(source, folder, dtype, metadata)
            elif target.to == "compressed":
                write_compressed.write(supply, folder, target.shard_bytes)
                _write_configs(source, folder, dtype, metadata, write_compressed.config_keys(source))
            elif target.to == "steelyard":
                _write_steelyard(supply, folder, metadata)
            else:
                write = write_megatron.torch_files if target.to == "megatron" else write_megatron.torch_dist
                write(supply, folder, target.layout)
                hf_metadata.write(metadata, folder)
            beside = folder if target.to in ("hf", "compressed") else folder / TOKENIZER
            _add_tokenizer(source, beside, None if target.tokenizer is None and source.tokenizer_files else tokenizer)
        if complete is not None:
            complete(folder)
        sha256sums.write(folder)
        if destination.is_dir():
            destination.rmdir()
    if target.to == "hf" and not hf_metadata.end_ids(metadata):
        console.warn(
            f"neither {source.path} nor a tokenizer has an EOS token, so generation in transformers will not stop; "
            "pass a tokenizer with --tokenizer"
        )
    return {"path": str(destination), "format": target.to, "dtype": str(dtype).removeprefix("torch."), "bytes": needed}


def _write_gguf(source: CheckpointSource, destination: Path, target: Target) -> dict[str, Any]:
    """Write one file, whose size is that of its own types: norms stay exact in F32."""
    kind = target.quantization or write_gguf.NAMES[target.dtype or torch.float16]
    supply = Supply(source, torch.float32)
    tokenizer = _tokenizer(source, target.tokenizer)
    metadata = _metadata(source, tokenizer, target.tokenizer is not None)
    with _disk_space(destination, write_gguf.bytes_of(supply, kind)):
        with console.progress("write gguf", supply.bytes, "bytes") as supply.progress:
            size = write_gguf.write(supply, destination, kind, tokenizer, metadata)
    return {"path": str(destination), "format": "gguf", "dtype": kind, "bytes": size}


def _tokenizer(source: CheckpointSource, named: str | None) -> Tokenizer | None:
    """Load the tokenizer to write, so that a damaged one is an error now and not when it is used."""
    if named is None and source.tokenizer is None:
        console.warn(f"{source.path} has no tokenizer, so none is written; pass one with --tokenizer")
        return None
    try:
        tokenizer = tokenizers.load_tokenizer(named) if named is not None else source.load_tokenizer()
    except UserError as error:
        if named is None:
            error.message = f"the tokenizer of the checkpoint cannot be used: {error.message}"
            error.hint = "copy or download it again, or pass another with --tokenizer"
        raise
    if tokenizer.vocab_size > source.config.vocab:
        message = f"the tokenizer has {tokenizer.vocab_size} ids, but the model only {source.config.vocab}"
        if named is not None or not source.tokenizer_files:
            raise UserError(message)
        console.warn(message)
    return tokenizer


def _metadata(source: CheckpointSource, tokenizer: Tokenizer | None, is_named: bool) -> dict[str, Any]:
    """The metadata of the source, with the ids of the tokenizer.

    Ids of the source take precedence over those of its own tokenizer, because a model may use other EOS ids. A
    tokenizer from the command line takes precedence over the source. A disagreement is printed in both cases.
    """
    metadata = source.hf_metadata
    if tokenizer is None:
        return metadata
    if hf_metadata.end_ids(metadata) and (remark := hf_metadata.disagreement(metadata, tokenizer)):
        if is_named:
            metadata = hf_metadata.of_another_vocabulary(metadata)
            remark += "; the ids of the tokenizer from the command line are written"
        console.warn(remark)
    return hf_metadata.with_tokenizer(metadata, tokenizer)


def refuse_destination(destination: Path, is_file: bool = False) -> None:
    """Raise if the destination exists or cannot be written, before any work is done."""
    if destination.exists() and (is_file or not destination.is_dir() or any(destination.iterdir())):
        raise UserError(f"{destination} already exists", hint=f"choose a new {'file' if is_file else 'folder'}")
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        probe = files.temporary_beside(destination)
        if not probe.exists():
            probe.mkdir()
            probe.rmdir()
    except OSError as error:
        if error.errno in DISK_FULL:
            raise
        raise UserError(
            f"{destination} cannot be written: {error.strerror}", hint="choose a folder with write permission"
        ) from None


@contextlib.contextmanager
def _disk_space(destination: Path, needed: int) -> Iterator[None]:
    """Raise if there is not enough disk space, and name the destination if the disk fills up during the block."""
    hint = "free some space, or choose a folder on another disk; nothing was kept"
    free = files.free_space(destination)
    if needed > free:
        raise RuntimeFailure(
            f"{destination} needs {units.size(needed)}, but only {units.size(free)} are free", hint=hint
        )
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        raise RuntimeFailure(f"{destination} needs {units.size(needed)}: {error.strerror}", hint=hint) from None
    except folders.CheckpointWriteError as error:
        raise RuntimeFailure(f"{destination} needs {units.size(needed)}: {error.message}", hint=hint) from None


class Supply:
    """The tensors of the target format, computed from those of a source."""

    progress: ProgressBar

    def __init__(self, source: CheckpointSource, dtype: torch.dtype) -> None:
        self.source, self.config, self.dtype = source, source.config, dtype
        self.sizes = expected_sizes(source.config)
        # Only Steelyard pads the vocabulary this way.
        for name in TABLES:
            if name in self.sizes:
                self.sizes[name] = (self.config.vocab, *self.sizes[name][1:])
        self._experts: dict[str, Tensor] = {}

    @property
    def bytes(self) -> int:
        """The total size of all tensors."""
        return sum(math.prod(size) for size in self.sizes.values()) * self.dtype.itemsize

    def size(self, entry: Entry) -> tuple[int, ...]:
        """The size of one tensor of the target format."""
        return theirs_size(entry, self.sizes)

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """One of our tensors in the target dtype, or another. It must be finite: the maximum of fp16 is 65504."""
        tensor, dtype = self.source.tensor(name), dtype or self.dtype
        if tensor.is_floating_point():
            tensor = tensor.to(dtype)
        hint = f"as {str(dtype).removeprefix('torch.')}; choose another dtype, or use another checkpoint"
        refuse_nonfinite({name: tensor}, self.source.path, hint)
        return tensor

    def parts(self, entry: Entry) -> list[Tensor]:
        """Our tensors from which one tensor of the target format is joined."""
        if entry.expert is not None:
            if self._experts.keys() != set(entry.ours):  # The next entries are the other experts.
                self._experts = {name: self.tensor(name) for name in entry.ours}
            self.progress.advance(math.prod(self.size(entry)) * self.dtype.itemsize)
            return [self._experts[name] for name in entry.ours]
        tensors = []
        for name in entry.ours:
            tensor = self.tensor(name)
            tensors.append(tensor[: self.config.vocab] if name in TABLES else tensor)
            self.progress.advance(tensor.numel() * self.dtype.itemsize)
        return tensors

    def whole(self, entry: Entry) -> Tensor:
        """One tensor of the target format."""
        return joined(entry, self.parts(entry), self.config)


def _write_hf(supply: Supply, folder: Path, shard_bytes: int) -> None:
    entries = hugging_face(supply.config)
    shards = list(_shards(entries, supply, shard_bytes))
    weight_map: dict[str, str] = {}
    total = 0
    for number, shard in enumerate(shards, start=1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        sizes = {entry.name: supply.size(entry) for entry in shard}
        total += sum(safetensors.write(folder / file, sizes, supply.dtype, map(supply.whole, shard)))
        weight_map |= {entry.name: file for entry in shard}
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
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


def _write_configs(
    source: CheckpointSource,
    folder: Path,
    dtype: torch.dtype,
    metadata: dict[str, Any],
    more: dict[str, Any] | None = None,
) -> None:
    files.write_json(folder / "config.json", configs.config_to_hf(source.config, dtype, metadata) | (more or {}))
    special = {key: metadata[key] for key in hf_metadata.SPECIAL if metadata.get(key) is not None}
    generation = dict(metadata.get("generation_config") or {"_from_model_config": True, **special})
    if generation.get("eos_token_id") is None and "eos_token_id" in special:  # transformers reads it only here.
        generation["eos_token_id"] = special["eos_token_id"]
    files.write_json(folder / "generation_config.json", generation)


def _write_steelyard(supply: Supply, folder: Path, metadata: dict[str, Any]) -> None:
    source, sizes = supply.source, expected_sizes(supply.config)

    def lazy(name: str) -> LazyTensor:
        def make(_: int) -> Tensor:
            supply.progress.advance(math.prod(sizes[name]) * supply.dtype.itemsize)
            return supply.tensor(name)

        return LazyTensor(make, sizes[name], supply.dtype)

    state = {
        "step": source.step or 0,
        "model": supply.config.model_dump(exclude_none=True),
        "extra": metadata,
    }
    folders.fill(folder, {f"{PREFIX}{name}": lazy(name) for name in source.names()}, state)


def _add_tokenizer(source: CheckpointSource, folder: Path, tokenizer: Tokenizer | None) -> None:
    """Write the tokenizer in Hugging Face format, or without one copy the tokenizer files of the source."""
    if tokenizer is not None:
        folder.mkdir(exist_ok=True)
        tokenizer.save(folder)
    elif source.tokenizer_files:
        folder.mkdir(exist_ok=True)
        for file in source.tokenizer_files:
            (folder / file.name).write_bytes(file.read_bytes())
