"""Write a model as a GGUF file of llama.cpp, tensor by tensor, with the package `gguf`.

Matrices get the requested type: F16 by default, F32, BF16, or Q8_0 (blocks of 32 weights with a scale). Zeros of a
pruned model stay zeros in all of them. Norms and biases are F32, as llama.cpp expects. Rows that are no multiple of 32
cannot be Q8_0 and are F16.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from steelyard.checkpoint.finite import refuse_nonfinite
from steelyard.checkpoint.formats import gguf_architectures, gguf_vocabulary
from steelyard.checkpoint.formats.gguf import ROPE_FREQS, block_of, quantized_bytes
from steelyard.checkpoint.formats.key_mapping import Entry
from steelyard.core import files
from steelyard.core.console import console
from steelyard.core.errors import UserError
from steelyard.core.recipe.model_section import ModelConfig, RotaryConfig
from steelyard.model.rope import scaled
from steelyard.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import gguf

    from steelyard.checkpoint.formats.write import Supply

NAMES = {torch.float16: "F16", torch.float32: "F32", torch.bfloat16: "BF16"}
# `general.file_type`, which is only shown.
FILE_TYPES = {"F32": 0, "F16": 1, "Q8_0": 7, "BF16": 32}
SUFFIX = ".gguf"


def refuse(config: ModelConfig, destination: Path) -> None:
    """Raise if the model cannot be written, before any work is done."""
    gguf_architectures.architecture_of(config)
    if destination.suffix != SUFFIX:
        raise UserError(f"{destination} is not the name of a GGUF file", hint=f"such as {destination}{SUFFIX}")


def bytes_of(supply: Supply, kind: str) -> int:
    """About the size of the file, for the check of disk space."""
    return quantized_bytes(kind, sum(math.prod(size) for size in supply.sizes.values()))


def write(supply: Supply, path: Path, kind: str, tokenizer: Tokenizer | None, metadata: dict[str, Any]) -> int:
    """Write the file under a temporary name, rename it, and return its size."""
    import gguf

    config = supply.config
    architecture = gguf_architectures.architecture_of(config)
    entries = gguf_architectures.entries_of(config, architecture)
    temporary = files.temporary_beside(path)
    writer = gguf.GGUFWriter(temporary, architecture)
    try:
        _add_settings(writer, supply, kind, tokenizer, metadata)
        kinds = [_kind_of(supply.size(entry), kind) for entry in entries]
        divisors = _rope_divisors(config)
        if divisors is not None:
            writer.add_tensor_info(ROPE_FREQS, divisors.shape, divisors.dtype, divisors.nbytes)
        for entry, each in zip(entries, kinds, strict=True):
            size = supply.size(entry)
            count = quantized_bytes(each, math.prod(size))
            code = gguf.GGMLQuantizationType[each]
            writer.add_tensor_info(entry.name, size, np.dtype(np.float32), count, raw_dtype=code)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for data in _arrays(supply, entries, kinds, divisors):
            writer.write_tensor_data(data)
        writer.close()
        files.sync_file(temporary)
        os.replace(temporary, path)
    finally:
        writer.close()
        temporary.unlink(missing_ok=True)
    files.sync_folder(path.parent)
    if kind == "Q8_0" and (others := kinds.count("F16")):
        console.warn(f"{others} matrices are F16: their rows are no multiple of 32")
    return path.stat().st_size


def _kind_of(size: tuple[int, ...], kind: str) -> str:
    if len(size) == 1:
        return "F32"
    return "F16" if size[-1] % block_of(kind)[0] else kind


def _arrays(
    supply: Supply, entries: list[Entry], kinds: list[str], divisors: np.ndarray[Any, Any] | None
) -> Iterator[np.ndarray[Any, Any]]:
    import gguf

    if divisors is not None:
        yield divisors
    for entry, kind in zip(entries, kinds, strict=True):
        whole = _shifted(entry, supply.whole(entry)).contiguous()
        if kind == "BF16":
            yield whole.bfloat16().view(torch.uint8).numpy()
        elif kind == "Q8_0":
            yield gguf.quantize(whole.float().numpy(), gguf.GGMLQuantizationType.Q8_0)
        else:
            whole = whole.half() if kind == "F16" else whole.float()
            refuse_nonfinite({entry.name: whole}, supply.source.path, "as fp16; choose --dtype bf16")
            yield whole.numpy()


def _shifted(entry: Entry, whole: Tensor) -> Tensor:
    """Gemma's scales: ours are the difference to 1, those in the file are whole."""
    return whole.float() + 1 if entry.ours[0].endswith(".offset") else whole


def _rope_divisors(config: ModelConfig) -> np.ndarray[Any, Any] | None:
    """The divisor of each rotary frequency, if the model has Llama 3's scaling."""
    assert isinstance(config, RotaryConfig)
    if config.rope_scaling is None or config.rope_scaling.kind != "llama3":
        return None
    frequencies = config.rope_theta ** -(torch.arange(0, config.head_dim, 2) / config.head_dim)
    return (frequencies / scaled(frequencies, config.rope_scaling)).float().numpy()


def _add_settings(
    writer: gguf.GGUFWriter, supply: Supply, kind: str, tokenizer: Tokenizer | None, metadata: dict[str, Any]
) -> None:
    config = supply.config
    settings = gguf_architectures.settings_of(config, metadata)
    writer.add_file_type(FILE_TYPES[kind])
    writer.add_quantization_version(2)
    for key, value in settings.items():
        _add(writer, f"{writer.arch}.{key}", value)
    assert isinstance(config, RotaryConfig)
    context, window = settings["context_length"], getattr(config, "window", None)
    if context == window:
        console.warn(
            f"llama.cpp has no sliding window in this architecture: the context is limited to {context} tokens"
        )
    if tokenizer is None:
        writer.add_tokenizer_model("none")
        return
    vocabulary = gguf_vocabulary.settings_of(tokenizer, config.vocab, metadata)
    for key, value in vocabulary.items():
        _add(writer, f"tokenizer.{key}", value)


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
