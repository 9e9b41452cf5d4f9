"""GGUF, the format of llama.cpp: one file with settings, vocabulary and tensors, often quantized.

    "GGUF", u32 version, u64 tensors, u64 settings
    settings    name, u32 type, value
    tensors     name, u32 dimensions, u64 of each (innermost first), u32 type, u64 offset in the data
    data        starts at the next multiple of `general.alignment`

Every length is checked against the size of the file before it is used. Weights are returned as fp32, or as fp16 if all
are fp16.

The rotary scaling of Llama 3 is stored as `rope_freqs.weight`, the divisor of each frequency. A recipe has the
parameters of the scaling instead, so the divisors are compared with those of the published models.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from steelyard.checkpoint.formats import gguf_architectures, gguf_tokenizer
from steelyard.checkpoint.formats.key_mapping import Entry
from steelyard.checkpoint.formats.mapped_tensors import MappedSource, Store
from steelyard.core.errors import CorruptFileError, UserError
from steelyard.core.recipe.model_section import RotaryConfig
from steelyard.core.recipe.rope_scaling import RopeScaling
from steelyard.model.rope import scaled
from steelyard.text.tokenizer import Tokenizer

NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
MOST_DIMENSIONS = 4
ROPE_FREQS = "rope_freqs.weight"
LARGEST_FACTOR = 10**6  # the limit of a recipe
SPECIAL = ("bos", "eos", "padding")
# A file named Q4_K_M contains Q4_K and Q6_K.
TYPES = (
    "F32", "F16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "BF16",
)  # fmt: skip
PLAIN = {"F32": "<f4", "F16": "<f2"}


class GgufSource(MappedSource):
    """A GGUF file."""

    settings: dict[str, Any]

    def load_tokenizer(self) -> Tokenizer:
        """The tokenizer that the file contains."""
        return gguf_tokenizer.from_settings(self.settings, str(self.path))


def opened(path: Path) -> GgufSource | None:
    """The model in a file, or in a folder with one such file."""
    if path.is_dir():
        files = sorted(path.glob("*.gguf"))
        if not files or (path / "config.json").is_file():
            return None
        if len(files) > 1:
            raise UserError(f"{path} has {len(files)} GGUF files", hint=f"pass one of them, such as {files[0]}")
        path = files[0]
    with open(path, "rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        if path.suffix != ".gguf":
            return None
        reason = "it is empty" if not magic else f"it starts with {magic!r} instead of b'GGUF'"
        raise CorruptFileError(f"not a GGUF file: {reason}", where=str(path))
    settings, tensors = _Reader(path).read()
    layout = {"files": 1, "types": sorted({tensor.kind for tensor in tensors.values()})}
    divisors = tensors.pop(ROPE_FREQS, None)
    config = gguf_architectures.config_of(settings, "output.weight" not in tensors, str(path))
    if divisors is not None:
        config = config.model_copy(update={"rope_scaling": _rope_scaling(config, divisors)})
    store = _File(tensors)
    entries = gguf_architectures.entries_of(config, settings["general.architecture"])
    source = GgufSource("gguf", path, config, store, entries, layout)
    source.settings = settings
    ids = {f"{name}_token_id": settings.get(f"tokenizer.ggml.{name}_token_id") for name in SPECIAL}
    source.hf_metadata = {key.replace("padding", "pad"): value for key, value in ids.items() if isinstance(value, int)}
    positions = settings.get(f"{settings['general.architecture']}.context_length")
    if isinstance(positions, int):
        source.hf_metadata["positions"] = positions
    if "tokenizer.ggml.tokens" in settings:
        source.tokenizer = str(path)
    return source


def block_of(kind: str) -> tuple[int, int]:
    """The weights and the bytes of a block of a quantization type."""
    import gguf

    return gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]


def quantized_bytes(kind: str, weights: int) -> int:
    """The bytes of this many weights."""
    block, block_bytes = block_of(kind)
    return weights // block * block_bytes


def _rope_scaling(config: RotaryConfig, tensor: _Tensor) -> RopeScaling | None:
    """The Llama 3 scaling with the divisors in the tensor; the largest divisor is its factor."""
    frequencies = config.rope_theta ** -(torch.arange(0, config.head_dim, 2) / config.head_dim)
    if tensor.size == tuple(frequencies.shape):
        divisors = tensor.read().float()
        factor = float(divisors.max())
        if factor == 1 and bool((divisors == 1).all()):
            return None
        if 1 < factor <= LARGEST_FACTOR:
            scaling = RopeScaling(factor=factor)
            if torch.allclose(frequencies / divisors, scaled(frequencies, scaling), rtol=1e-4, atol=0):
                return scaling
    raise UserError(
        f"the rotary frequencies in {ROPE_FREQS} are not those of Llama 3",
        where=str(tensor.path),
        hint="use the original weights",
    )


@dataclass(frozen=True)
class _Tensor:
    path: Path
    offset: int
    kind: str
    size: tuple[int, ...]

    def read(self) -> Tensor:
        data = np.fromfile(self.path, np.uint8, quantized_bytes(self.kind, math.prod(self.size)), offset=self.offset)
        if self.kind in PLAIN:
            return torch.from_numpy(data.view(PLAIN[self.kind]).reshape(self.size))
        import gguf

        # Pass whole rows: `gguf` processes 16 rows at a time, so single blocks as rows would take minutes.
        rows = data.reshape(math.prod(self.size[:-1]), -1) if data.size else data.reshape(0, block_of(self.kind)[1])
        return torch.from_numpy(gguf.dequantize(rows, gguf.GGMLQuantizationType[self.kind]).reshape(self.size))


class _File(Store):
    def __init__(self, tensors: dict[str, _Tensor]) -> None:
        self.tensors = tensors

    def sizes(self) -> dict[str, tuple[int, ...]]:
        return {name: tensor.size for name, tensor in self.tensors.items()}

    def dtypes(self) -> set[torch.dtype]:
        return {torch.float16 if tensor.kind == "F16" else torch.float32 for tensor in self.tensors.values()}

    def read(self, entry: Entry) -> Tensor:
        whole = self.tensors[entry.name].read()
        # Gemma's scales: ours are the difference to 1, those in the file are whole.
        return whole.float() - 1 if entry.ours[0].endswith(".offset") else whole


class _Reader:
    """Reads and checks the header of a file."""

    def __init__(self, path: Path) -> None:
        self.path, self.length = path, path.stat().st_size

    def read(self) -> tuple[dict[str, Any], dict[str, _Tensor]]:
        with open(self.path, "rb") as self.file:
            self.file.seek(4)
            version, tensors, settings = self.number("I"), self.number("Q"), self.number("Q")
            if version not in (2, 3):
                raise self.broken(f"version {version} is not supported")
            # A setting or a tensor takes at least twelve bytes.
            if max(tensors, settings) > self.length // 12:
                raise self.broken(
                    f"the header announces {tensors} tensors and {settings} settings, more than fit in the file"
                )
            table = {self.string(): self.value(self.number("I")) for _ in range(settings)}
            described = [self.tensor() for _ in range(tensors)]
            alignment = table.get("general.alignment", 32)
            if not isinstance(alignment, int) or not 0 < alignment <= 1 << 20:
                raise self.broken(f"its alignment is {alignment}")
            start = -(-self.file.tell() // alignment) * alignment
        return table, {name: self.placed(name, kind, size, start + offset) for name, kind, size, offset in described}

    def tensor(self) -> tuple[str, int, tuple[int, ...], int]:
        name, dimensions = self.string(), self.number("I")
        if dimensions > MOST_DIMENSIONS:
            raise self.broken(f"{name} has {dimensions} dimensions")
        size = tuple(self.number("Q") for _ in range(dimensions))[::-1]
        return name, self.number("I"), size, self.number("Q")

    def placed(self, name: str, code: int, size: tuple[int, ...], offset: int) -> _Tensor:
        import gguf

        kind = next((kind for kind in TYPES if gguf.GGMLQuantizationType[kind] == code), None)
        if kind is None:
            hint = f"supported are {', '.join(TYPES)}"
            raise UserError(f"{name} has the quantization type {code}", where=str(self.path), hint=hint)
        if math.prod(size[-1:]) % block_of(kind)[0] or offset + quantized_bytes(kind, math.prod(size)) > self.length:
            raise self.broken(f"{name} of the size {size} does not fit in the file")
        return _Tensor(self.path, offset, kind, size)

    def number(self, code: str) -> Any:
        size = struct.calcsize(f"<{code}")
        return struct.unpack(f"<{code}", self.bytes(size))[0]

    def string(self) -> str:
        return self.bytes(self.number("Q")).decode("utf-8", errors="replace")

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind in NUMBERS:
            return self.number(NUMBERS[kind])
        if kind == STRING:
            return self.string()
        if kind != ARRAY or depth > 2:
            raise self.broken(f"a setting has the type {kind}")
        inner, count = self.number("I"), self.number("Q")
        if count > self.length:
            raise self.broken(f"a setting has {count} values")
        if inner in NUMBERS:
            width = struct.calcsize(f"<{NUMBERS[inner]}")
            return list(struct.unpack(f"<{count}{NUMBERS[inner]}", self.bytes(width * count)))
        return [self.value(inner, depth + 1) for _ in range(count)]

    def bytes(self, count: int) -> bytes:
        if count > self.length - self.file.tell():
            raise self.broken(f"{count} bytes are expected, but {self.length - self.file.tell()} are left")
        return self.file.read(count)

    def broken(self, reason: str) -> CorruptFileError:
        return CorruptFileError(f"not a valid GGUF file: {reason}", where=str(self.path))
