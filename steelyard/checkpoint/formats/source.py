"""A checkpoint of any format: a model config, and tensors by Steelyard's names, read one at a time.

Tensors are whole: shards are joined, transposes undone, fused projections split. Embedding and head have
`config.padded_vocab` rows; those after `config.vocab` are padding, and zero if the source has none.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import ValidationError
from torch import Tensor

from steelyard import model
from steelyard.checkpoint import hub
from steelyard.checkpoint.folder import STATE
from steelyard.checkpoint.sharded_tensor import TensorShard
from steelyard.core.console import console
from steelyard.core.errors import SteelyardError, UserError
from steelyard.core.recipe.model_section import ModelConfig
from steelyard.core.run import MANIFEST
from steelyard.model import LanguageModel
from steelyard.text import tokenizer as tokenizers
from steelyard.text.tokenizer import Tokenizer

# One module per format. Each has `opened(path)`, which returns None if the path has another format.
FORMATS = ("native", "gguf", "compressed_tensors", "huggingface", "deepspeed", "megatron_dist", "megatron")
KNOWN = (
    "a Hugging Face folder, a GGUF file, a Megatron checkpoint (torch or torch_dist), a Megatron-DeepSpeed global_step "
    "folder, a Steelyard run or checkpoint, a folder that export-sparse wrote, or a name on the hub (user/model)"
)
# Settings that do not change what weights compute, or that are checked by sizes.
NOT_COMPARED = {
    "vocab", "vocab_multiple", "init_std", "dropout", "attention_dropout", "z_loss", "aux_loss", "router_z_loss",
    "capacity",
}  # fmt: skip
TABLES = ("embed.weight", "head.weight")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class StoredTensor(NamedTuple):
    """A tensor in the files of a source: its name there, its size (None if it is missing), and its expected size."""

    name: str
    found: tuple[int, ...] | None
    wanted: tuple[int, ...]


class CheckpointSource(ABC):
    """A checkpoint on disk."""

    format: str
    """hf, gguf, megatron, megatron-dist, deepspeed, compressed or steelyard."""
    path: Path
    config: ModelConfig
    dtype: torch.dtype
    """The narrowest dtype that represents every tensor exactly."""
    step: int | None = None
    layout: dict[str, Any]
    """How it is sharded: files, tensor, pipeline and so on."""
    hf_metadata: dict[str, Any]
    """Other metadata for a writer, such as positions and special tokens."""
    tokenizer: str | None = None
    """The argument of `text.tokenizer.load_tokenizer`, if the source has a tokenizer."""
    tokenizer_files: list[Path]
    """The tokenizer files of a Hugging Face folder."""
    remark: str | None = None
    """A warning to print when the weights are converted."""

    @abstractmethod
    def names(self) -> list[str]:
        """The tensors, by Steelyard's names, in the best order for reading. A tied head is not listed."""

    @abstractmethod
    def tensor(self, name: str) -> Tensor:
        """One whole tensor, in its own dtype. It may be memory-mapped: release it before reading the next."""

    @abstractmethod
    def sizes(self) -> dict[str, tuple[int, ...]]:
        """The size of each tensor in the files, including padding of the vocabulary, without reading the tensors."""

    def in_files(self, name: str, expected: dict[str, tuple[int, ...]]) -> StoredTensor:
        """The tensor in the files that has our tensor `name`, given the expected sizes of all our tensors."""
        return StoredTensor(name, self.sizes().get(name), expected[name])

    def load_tokenizer(self) -> Tokenizer:
        """The tokenizer of the model."""
        if self.tokenizer is None:
            raise UserError(f"{self.path} has no tokenizer", hint="pass a tokenizer")
        return tokenizers.load_tokenizer(self.tokenizer)


class SourceView(CheckpointSource):
    """A view of another source, unchanged. A subclass changes tensors or metadata."""

    def __init__(self, origin: CheckpointSource) -> None:
        self.origin = origin
        self.format, self.path, self.config, self.dtype = origin.format, origin.path, origin.config, origin.dtype
        self.step, self.layout, self.hf_metadata = origin.step, origin.layout, origin.hf_metadata
        self.tokenizer, self.tokenizer_files = origin.tokenizer, origin.tokenizer_files

    def names(self) -> list[str]:
        """The same as in the origin."""
        return self.origin.names()

    def sizes(self) -> dict[str, tuple[int, ...]]:
        """The same as in the origin."""
        return self.origin.sizes()

    def tensor(self, name: str) -> Tensor:
        """The same as in the origin."""
        return self.origin.tensor(name)

    def load_tokenizer(self) -> Tokenizer:
        """The origin's tokenizer (in a GGUF it is not a file of its own), or another one that was set."""
        is_set = self.tokenizer is not None and self.tokenizer != self.origin.tokenizer
        return super().load_tokenizer() if is_set else self.origin.load_tokenizer()


def open_source(path: str | Path) -> CheckpointSource:
    """Open a checkpoint of any format, by path or by name on the hub. This does not read the weights."""
    local = Path(path).expanduser()
    if not local.exists():
        if not _may_be_on_the_hub(str(path)):
            raise UserError(f"there is no checkpoint {path}", hint=f"a checkpoint is {KNOWN}")
        try:
            local = hub.fetch(str(path))
        except SteelyardError as error:
            error.message = f"there is no file or folder {path}, and {error.message}"
            raise
    for name in FORMATS:
        source: CheckpointSource | None = import_module(f"steelyard.checkpoint.formats.{name}").opened(local)
        if source is not None:
            return source
    raise UserError(f"{path} is not a checkpoint of a supported format", hint=f"a checkpoint is {KNOWN}")


def is_own(path: str | Path) -> bool:
    """Whether a path is a Steelyard run or checkpoint."""
    return any((Path(path) / name).is_file() for name in (STATE, MANIFEST))


def load_into(source: CheckpointSource, network: LanguageModel) -> None:
    """Load a whole model. Missing, unknown and mismatched tensors are reported by name before anything is read."""
    parameters = dict(network.named_parameters())
    check(source, network.config, parameters)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(source.tensor(name))


def load_shards(source: CheckpointSource, pieces: Mapping[str, TensorShard], config: ModelConfig) -> None:
    """Load a rank's shards of a model of the given config. Their names are `model.<name>`."""
    check(source, config)
    if source.config.family != config.family:
        raise UserError(
            f"{source.path} is a model of the family {source.config.family}, but model.family is {config.family}",
            hint=f'set model.family = "{source.config.family}"',
        )
    for key in type(config).model_fields.keys() - NOT_COMPARED:
        value = getattr(source.config, key, None)
        if value != getattr(config, key, value):
            console.warn(f"model.{key} is {getattr(config, key)}, but {value} in {source.path}")
    if source.config.vocab > config.vocab:
        console.warn(
            f"model.vocab is {config.vocab}, but {source.config.vocab} in {source.path}: the other rows are ignored"
        )
    for name, piece in pieces.items():
        whole = source.tensor(name.removeprefix("model."))
        if whole.shape[0] != piece.shape[0]:
            whole = padded(whole, config)
        for dim, (first, length) in enumerate(zip(piece.offset, piece.tensor.shape, strict=True)):
            whole = whole.narrow(dim, first, length)
        piece.tensor.copy_(whole)


def check(source: CheckpointSource, config: ModelConfig, wanted: Iterable[str] | None = None) -> None:
    """Raise if the tensors of a source do not fit a model of this config."""
    if holds_adapters(source):
        raise UserError(
            f"{source.path} contains only adapters", hint="steelyard adapter merge BASE RUN OUT writes merged weights"
        )
    wrong = misfits(source, config, wanted)
    if wrong:
        more = [f"and {len(wrong) - 10} more"] if len(wrong) > 10 else []
        raise UserError(f"{source.path} does not fit the model:\n  " + "\n  ".join(wrong[:10] + more))


def holds_adapters(source: CheckpointSource) -> bool:
    """Whether a source contains adapters without the frozen weights."""
    return any(name.endswith(".adapter_in") for name in source.names())


def misfits(source: CheckpointSource, config: ModelConfig, wanted: Iterable[str] | None = None) -> list[str]:
    """One line for each tensor that is missing, unknown or of another size than in a model of this config."""
    expected, found = expected_sizes(config), source.sizes()
    wrong = [f"{name}: unknown" for name in found if name not in expected]
    misfits: dict[StoredTensor, list[str]] = {}  # A stored tensor may contain several of ours.
    for name in expected if wanted is None else wanted:
        size = expected[name]
        if found.get(name) != size and not _is_padded(found.get(name), size, config):
            misfits.setdefault(source.in_files(name, expected), []).append(name)
    for theirs, ours in misfits.items():
        here = "" if ours == [theirs.name] else f" (here {', '.join(ours)})"
        problem = "missing" if theirs.found is None else f"{theirs.found} in the checkpoint, {theirs.wanted} expected"
        wrong.append(f"{theirs.name}{here}: {problem}")
    return wrong


def expected_sizes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The size of each parameter of a model of this config, by name."""
    with torch.device("meta"):
        return {name: tuple(parameter.shape) for name, parameter in model.build(config).named_parameters()}


def _is_padded(found: tuple[int, ...] | None, size: tuple[int, ...], config: ModelConfig) -> bool:
    """Whether this is an embedding or head with more or less padding than ours."""
    return found is not None and size[0] == config.padded_vocab and found[1:] == size[1:] and found[0] >= config.vocab


def padded(table: Tensor, config: ModelConfig) -> Tensor:
    """An embedding or head, padded or truncated to `config.padded_vocab` rows."""
    rows = config.padded_vocab
    if len(table) >= rows:
        return table[:rows]
    return torch.cat([table[: config.vocab], table.new_zeros(rows - min(len(table), config.vocab), table.shape[1])])


def first_problem(error: Exception) -> str:
    """The first validation error of external settings, in one line."""
    if isinstance(error, ValidationError):
        problem = error.errors()[0]
        return f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}, not {problem['input']!s:.40}"
    return str(error)


def _may_be_on_the_hub(name: str) -> bool:
    """Whether a missing path may be `user/model`: not if its parent folder exists, which suggests a typo."""
    return name.count("/") == 1 and hub.is_name(name) and not Path(name).parent.exists()
