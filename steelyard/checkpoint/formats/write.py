"""Writing a source as another format: tensor by tensor, so that memory holds little more than the largest one.

Everything is written into a folder that takes its name at the end. All tensors get one dtype: the one asked for, or
the source's, which holds all of them exactly.
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
from steelyard.checkpoint.formats import compressed_tensors, safetensors, write_megatron
from steelyard.checkpoint.formats import hf_config as configs
from steelyard.checkpoint.formats import hf_metadata as extras
from steelyard.checkpoint.formats.key_mapping import Entry, hugging_face, joined, theirs_size
from steelyard.checkpoint.formats.native import PREFIX, TOKENIZER
from steelyard.checkpoint.formats.source import TABLES, CheckpointSource, check, expected_sizes
from steelyard.checkpoint.formats.write_megatron import MegatronLayout
from steelyard.checkpoint.sharded_tensor import LazyTensor
from steelyard.core import files, sha256sums, units
from steelyard.core.console import ProgressBar, console
from steelyard.core.errors import RuntimeFailure, UserError
from steelyard.text import tokenizer as tokenizers
from steelyard.text.tokenizer import Tokenizer

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT)
SHARD_BYTES = 5_000_000_000
WHOLE = MegatronLayout()


@dataclass(frozen=True)
class Target:
    """What to write. The layout matters to Megatron alone."""

    to: str
    layout: MegatronLayout = WHOLE
    dtype: torch.dtype | None = None
    shard_bytes: int = SHARD_BYTES
    tokenizer: str | None = None


def convert(
    source: CheckpointSource, destination: Path, target: Target, complete: Callable[[Path], None] | None = None
) -> dict[str, Any]:
    """Write a checkpoint, refusing first what would fail; `complete` may change the folder before it gets its sums."""
    refuse_destination(destination)
    check(source, source.config)
    dtype = target.dtype or source.dtype
    if target.to != "megatron" and target.layout != WHOLE:
        raise UserError(
            f"{target.to} checkpoints are not divided among ranks", hint="leave out --tensor and --pipeline"
        )
    if source.remark is not None:
        console.warn(source.remark)
    supply = Supply(source, dtype)
    needed = write_megatron.bytes_of(supply, target.layout) if target.to == "megatron" else supply.bytes
    tokenizer = _tokenizer(source, target.tokenizer)
    extra = _extra(source, tokenizer, target.tokenizer is not None)
    with _room(destination, needed), files.atomic_folder(destination) as folder:
        with console.progress(f"write {target.to}", supply.bytes, "bytes") as supply.progress:
            if target.to == "hf":
                _write_hf(supply, folder, target.shard_bytes)
                _write_configs(source, folder, dtype, extra)
            elif target.to == "compressed":
                _write_compressed(supply, folder, target.shard_bytes)
                _write_configs(source, folder, dtype, extra)
            elif target.to == "steelyard":
                _write_steelyard(supply, folder, extra)
            else:
                write = write_megatron.torch_files if target.to == "megatron" else write_megatron.torch_dist
                write(supply, folder, target.layout)
                extras.keep(extra, folder)
            beside = folder if target.to in ("hf", "compressed") else folder / TOKENIZER
            _add_tokenizer(source, beside, None if target.tokenizer is None and source.tokenizer_files else tokenizer)
        if complete is not None:
            complete(folder)
        sha256sums.write(folder)
        if destination.is_dir():
            destination.rmdir()
    if target.to == "hf" and not extras.end_ids(extra):
        console.warn(
            f"neither {source.path} nor a tokenizer names an end token, so that transformers will not stop by itself; "
            "--tokenizer names one"
        )
    return {"path": str(destination), "format": target.to, "dtype": str(dtype).removeprefix("torch."), "bytes": needed}


def _tokenizer(source: CheckpointSource, named: str | None) -> Tokenizer | None:
    """The tokenizer that goes along, seen to load: a damaged one would be found out only by whoever needs it."""
    if named is None and source.tokenizer is None:
        console.warn(f"{source.path} comes without a tokenizer, so none is written; --tokenizer names one")
        return None
    try:
        found = tokenizers.load_tokenizer(named) if named is not None else source.load_tokenizer()
    except UserError as error:
        if named is None:
            error.message = f"the tokenizer that comes along cannot be used: {error.message}"
            error.hint = "copy or download it again, or name another with --tokenizer"
        raise
    if found.vocab_size > source.config.vocab:
        reported = f"the tokenizer has {found.vocab_size} ids, and the model only {source.config.vocab}"
        if named is not None or not source.tokenizer_files:
            raise UserError(reported)
        console.warn(reported)
    return found


def _extra(source: CheckpointSource, tokenizer: Tokenizer | None, is_named: bool) -> dict[str, Any]:
    """What the source says beside its weights, with the tokenizer's ids.

    What came along with a tokenizer outweighs it, since models may end texts at ids of their own; a tokenizer that was
    named outweighs what came along. Either way a disagreement is told.
    """
    extra = source.extra
    if tokenizer is None:
        return extra
    if extras.end_ids(extra) and (remark := extras.disagreement(extra, tokenizer)):
        if is_named:
            extra = extras.of_another_vocabulary(extra)
            remark += "; the tokenizer was named, so that its ids are written"
        console.warn(remark)
    return extras.with_tokenizer(extra, tokenizer)


def refuse_destination(destination: Path, is_file: bool = False) -> None:
    """Refuse a destination that is taken or that nothing can be written at, before the work and by its name."""
    if destination.exists() and (is_file or not destination.is_dir() or any(destination.iterdir())):
        raise UserError(f"{destination} is there already", hint=f"name a new {'file' if is_file else 'folder'}")
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        probe = files.temporary_beside(destination)
        if not probe.exists():
            probe.mkdir()
            probe.rmdir()
    except OSError as error:
        if error.errno in OF_THE_DISK:
            raise
        raise UserError(
            f"{destination} cannot be written: {error.strerror}", hint="name a folder that you may write to"
        ) from None


@contextlib.contextmanager
def _room(destination: Path, needed: int) -> Iterator[None]:
    """Refuse what the disk has no room for, and name the place if it is full in the end all the same."""
    hint = "make room, or name a folder on another disk; nothing was kept"
    free = files.free_space(destination)
    if needed > free:
        raise RuntimeFailure(
            f"{destination} would take {units.size(needed)}, and {units.size(free)} are free", hint=hint
        )
    try:
        yield
    except OSError as error:
        if error.errno not in OF_THE_DISK:
            raise
        raise RuntimeFailure(f"{destination} takes {units.size(needed)}: {error.strerror}", hint=hint) from None
    except folders.CheckpointWriteError as error:
        raise RuntimeFailure(f"{destination} takes {units.size(needed)}: {error.message}", hint=hint) from None


class Supply:
    """Their tensors, made from a source's."""

    progress: ProgressBar

    def __init__(self, source: CheckpointSource, dtype: torch.dtype) -> None:
        self.source, self.config, self.dtype = source, source.config, dtype
        self.sizes = expected_sizes(source.config)
        # Padding of the vocabulary is ours alone.
        for name in TABLES:
            if name in self.sizes:
                self.sizes[name] = (self.config.vocab, *self.sizes[name][1:])

    @property
    def bytes(self) -> int:
        """What all tensors take, each once."""
        return sum(math.prod(size) for size in self.sizes.values()) * self.dtype.itemsize

    def size(self, entry: Entry) -> tuple[int, ...]:
        """The size of one of their tensors."""
        return theirs_size(entry, self.sizes)

    def tensor(self, name: str) -> Tensor:
        """One of our tensors as it is written, which must be finite: fp16 holds nothing beyond 65504."""
        tensor = self.source.tensor(name)
        if tensor.is_floating_point():
            tensor = tensor.to(self.dtype)
        hint = f"as {str(self.dtype).removeprefix('torch.')}; choose another dtype, or use another checkpoint"
        refuse_nonfinite({name: tensor}, self.source.path, hint)
        return tensor

    def parts(self, entry: Entry) -> list[Tensor]:
        """Our tensors that one of theirs is made of."""
        found = []
        for name in entry.ours:
            tensor = self.tensor(name)
            found.append(tensor[: self.config.vocab] if name in TABLES else tensor)
            self.progress.advance(tensor.numel() * self.dtype.itemsize)
        return found

    def whole(self, entry: Entry) -> Tensor:
        """One of their tensors."""
        return joined(entry, self.parts(entry), self.config)


def _write_hf(supply: Supply, folder: Path, shard_bytes: int) -> None:
    entries = hugging_face(supply.config)
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
            values, indices = compressed_tensors.parts_of(name)
            sizes |= {values: (size[0], size[1] // 2), indices: (size[0], compressed_tensors.indices_of_row(size[1]))}
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
    about = {"format": compressed_tensors.FORMAT, "version": compressed_tensors.VERSION}
    for number, shard in enumerate(shards, start=1):
        file = "sparse.safetensors" if len(shards) == 1 else f"sparse-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = (supply.tensor(name)[: sizes[name][0]] for name in shard)
        for size_written in safetensors.write(
            folder / file, {name: sizes[name] for name in shard}, dtypes, tensors, about
        ):
            supply.progress.advance(size_written)


def _write_configs(source: CheckpointSource, folder: Path, dtype: torch.dtype, extra: dict[str, Any]) -> None:
    files.write_json(folder / "config.json", configs.config_to_hf(source.config, dtype, extra))
    special = {key: extra[key] for key in extras.SPECIAL if extra.get(key) is not None}
    generation = dict(extra.get("generation_config") or {"_from_model_config": True, **special})
    if generation.get("eos_token_id") is None and "eos_token_id" in special:  # transformers asks nothing else.
        generation["eos_token_id"] = special["eos_token_id"]
    files.write_json(folder / "generation_config.json", generation)


def _write_steelyard(supply: Supply, folder: Path, extra: dict[str, Any]) -> None:
    source, sizes = supply.source, expected_sizes(supply.config)

    def made(name: str) -> LazyTensor:
        def make(_: int) -> Tensor:
            supply.progress.advance(math.prod(sizes[name]) * supply.dtype.itemsize)
            return supply.tensor(name)

        return LazyTensor(make, sizes[name], supply.dtype)

    state = {
        "step": source.step or 0,
        "model": supply.config.model_dump(exclude_none=True),
        "extra": extra,
    }
    folders.fill(folder, {f"{PREFIX}{name}": made(name) for name in source.names()}, state)


def _add_tokenizer(source: CheckpointSource, folder: Path, tokenizer: Tokenizer | None) -> None:
    """Put the tokenizer beside the weights: this one as Hugging Face's, or the source's own files as they are."""
    if tokenizer is not None:
        folder.mkdir(exist_ok=True)
        tokenizer.save(folder)
    elif source.tokenizer_files:
        folder.mkdir(exist_ok=True)
        for file in source.tokenizer_files:
            (folder / file.name).write_bytes(file.read_bytes())
