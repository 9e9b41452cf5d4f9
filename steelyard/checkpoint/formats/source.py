"""A checkpoint that can be read, whatever wrote it: a shape, and tensors by Steelyard's names, one at a time.

Tensors are whole: pieces of other layouts are joined, transposes undone, fused projections taken apart. Embedding and
head have `shape.padded_vocab` rows; those past `shape.vocab` stand for no id, and are zero where the source has none.
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
from steelyard.core.recipe.model_section import GptConfig, LlamaConfig
from steelyard.core.run import MANIFEST
from steelyard.model import LanguageModel
from steelyard.text import tokenizer as tokenizers
from steelyard.text.tokenizer import Tokenizer

# Modules beside this one that know a format. Each has `opened(path)`, which returns None where the path is not its own.
FORMATS = ("native", "gguf", "compressed_tensors", "huggingface", "deepspeed", "megatron_dist", "megatron")
KNOWN = (
    "a Hugging Face folder, a GGUF file, a Megatron checkpoint (torch or torch_dist), a Megatron-DeepSpeed global_step "
    "folder, a Steelyard run or checkpoint, a folder that export-sparse wrote, or a name on the hub (user/model)"
)
# Settings that change what weights of the same sizes compute.
ARITHMETIC = ("heads", "kv_heads", "rope_theta", "rope_scaling", "norm_eps")
TABLES = ("embed.weight", "head.weight")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Lying(NamedTuple):
    """A tensor in the files of a source: its name there, its size if it is there, and the size it should have."""

    name: str
    found: tuple[int, ...] | None
    wanted: tuple[int, ...]


class CheckpointSource(ABC):
    """A checkpoint on disk."""

    format: str
    """hf, gguf, megatron, megatron-dist, deepspeed, compressed or steelyard."""
    path: Path
    config: GptConfig | LlamaConfig
    dtype: torch.dtype
    """The narrowest that holds every tensor exactly."""
    step: int | None = None
    layout: dict[str, Any]
    """How it is divided: files, tensor, pipeline and so on."""
    extra: dict[str, Any]
    """What else the source says about itself that a writer may want, such as positions and special tokens."""
    tokenizer: str | None = None
    """What `text.tokenizer.load` finds the tokenizer by, if one came along."""
    tokenizer_files: list[Path]
    """Files of a Hugging Face folder that a copy of the tokenizer needs."""
    remark: str | None = None
    """What whoever writes these weights elsewhere should know about them."""

    @abstractmethod
    def names(self) -> list[str]:
        """The tensors, by Steelyard's names, in the order in which they are best read. A tied head is not named."""

    @abstractmethod
    def tensor(self, name: str) -> Tensor:
        """One whole tensor, in its own dtype. It may lie in the file still: let go of it before the next."""

    @abstractmethod
    def sizes(self) -> dict[str, tuple[int, ...]]:
        """The size of each tensor, without reading any, as found in the files: padding of the vocabulary included."""

    def in_files(self, name: str, expected: dict[str, tuple[int, ...]]) -> Lying:
        """How a tensor of ours lies in the files, given the sizes that all of ours should have."""
        return Lying(name, self.sizes().get(name), expected[name])

    def load_tokenizer(self) -> Tokenizer:
        """The tokenizer that belongs to the model."""
        if self.tokenizer is None:
            raise UserError(f"{self.path} comes without a tokenizer", hint="name one")
        return tokenizers.load_tokenizer(self.tokenizer)


def open_source(path: str | Path) -> CheckpointSource:
    """Open whatever a user means by a path, or say what can be opened. Nothing of the weights is read yet."""
    found = Path(path).expanduser()
    if not found.exists():
        if not _may_be_on_the_hub(str(path)):
            raise UserError(f"there is no checkpoint {path}", hint=f"a checkpoint is {KNOWN}")
        try:
            found = hub.fetch(str(path))
        except SteelyardError as error:
            error.message = f"there is no file or folder {path}, and {error.message}"
            raise
    for name in FORMATS:
        source: CheckpointSource | None = import_module(f"steelyard.checkpoint.formats.{name}").opened(found)
        if source is not None:
            return source
    raise UserError(f"{path} is no checkpoint of a known kind", hint=f"a checkpoint is {KNOWN}")


def is_own(path: str | Path) -> bool:
    """Whether a path is a run or a checkpoint of ours."""
    return any((Path(path) / name).is_file() for name in (STATE, MANIFEST))


def load_into(source: CheckpointSource, network: LanguageModel) -> None:
    """Fill a whole model. What is missing, unknown or of another size is listed by name, before anything is read."""
    parameters = dict(network.named_parameters())
    check(source, network.config, parameters)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(source.tensor(name))


def load_pieces(source: CheckpointSource, pieces: Mapping[str, TensorShard], config: GptConfig | LlamaConfig) -> None:
    """Fill a rank's pieces of a model of the given shape, which are named `model.<name>`."""
    check(source, config)
    for key, value in source.config.model_dump().items():
        if key in ARITHMETIC and value != getattr(config, key, value):
            console.warn(f"model.{key} is {getattr(config, key)}, and {value} in {source.path}")
    if source.config.vocab > config.vocab:
        console.warn(
            f"model.vocab is {config.vocab}, and {source.config.vocab} in {source.path}: the rows beyond are left out"
        )
    for name, piece in pieces.items():
        whole = source.tensor(name.removeprefix("model."))
        if whole.shape[0] != piece.shape[0]:
            whole = padded(whole, config)
        for dim, (first, length) in enumerate(zip(piece.offset, piece.tensor.shape, strict=True)):
            whole = whole.narrow(dim, first, length)
        piece.tensor.copy_(whole)


def check(source: CheckpointSource, config: GptConfig | LlamaConfig, wanted: Iterable[str] | None = None) -> None:
    """Refuse a source whose tensors are not those of a model of this shape."""
    if holds_adapters(source):
        raise UserError(
            f"{source.path} holds adapters alone", hint="steelyard adapter merge BASE RUN OUT writes whole weights"
        )
    wrong = misfits(source, config, wanted)
    if wrong:
        more = [f"and {len(wrong) - 10} more"] if len(wrong) > 10 else []
        raise UserError(f"{source.path} does not fit the model:\n  " + "\n  ".join(wrong[:10] + more))


def holds_adapters(source: CheckpointSource) -> bool:
    """Whether a source holds what was learned beside frozen weights, and not those."""
    return any(name.endswith(".adapter_in") for name in source.names())


def misfits(
    source: CheckpointSource, config: GptConfig | LlamaConfig, wanted: Iterable[str] | None = None
) -> list[str]:
    """The tensors that are missing, unknown or of another size than in a model of this shape, one line each."""
    expected, found = expected_sizes(config), source.sizes()
    wrong = [f"{name}: unknown" for name in found if name not in expected]
    misfits: dict[Lying, list[str]] = {}  # One of theirs may hold several of ours.
    for name in expected if wanted is None else wanted:
        size = expected[name]
        if found.get(name) != size and not _is_padded(found.get(name), size, config):
            misfits.setdefault(source.in_files(name, expected), []).append(name)
    for theirs, ours in misfits.items():
        here = "" if ours == [theirs.name] else f" (here {', '.join(ours)})"
        reported = "missing" if theirs.found is None else f"{theirs.found} in the checkpoint, {theirs.wanted} wanted"
        wrong.append(f"{theirs.name}{here}: {reported}")
    return wrong


def expected_sizes(config: GptConfig | LlamaConfig) -> dict[str, tuple[int, ...]]:
    """The parameters of a model of this shape, by name."""
    with torch.device("meta"):
        return {name: tuple(parameter.shape) for name, parameter in model.build(config).named_parameters()}


def _is_padded(found: tuple[int, ...] | None, size: tuple[int, ...], config: GptConfig | LlamaConfig) -> bool:
    """Whether this is a table of the vocabulary that is padded more, or less, than ours."""
    return found is not None and size[0] == config.padded_vocab and found[1:] == size[1:] and found[0] >= config.vocab


def padded(table: Tensor, config: GptConfig | LlamaConfig) -> Tensor:
    """An embedding or a head with as many rows as Steelyard's."""
    rows = config.padded_vocab
    if len(table) >= rows:
        return table[:rows]
    return torch.cat([table[: config.vocab], table.new_zeros(rows - min(len(table), config.vocab), table.shape[1])])


def first_problem(error: Exception) -> str:
    """What is wrong with settings that a stranger wrote, in a line."""
    if isinstance(error, ValidationError):
        problem = error.errors()[0]
        return f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}, not {problem['input']!s:.40}"
    return str(error)


def _may_be_on_the_hub(name: str) -> bool:
    """Whether a path that is not there may be `user/model`: a slip in a path to a folder that is there is not."""
    return name.count("/") == 1 and hub.is_name(name) and not Path(name).parent.exists()
