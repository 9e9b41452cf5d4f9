"""Mask files: masks of all matrices in less than a bit per weight.

A safetensors file with one byte tensor (U8) for each masked matrix, under its name. With the pattern 2:4 or 1:4 a
matrix is a sequence of groups in row-major order, and a group is stored as the index of its mask in
`Pattern.candidates()`: three bits for 2:4 (0.75 bits per weight), two for 1:4 (0.5). The lowest bits of all groups come
first, then all second bits, then all third bits (bit planes). Any other pattern has one bit per weight. Bits are packed
into bytes, the first in the lowest position; each bit plane starts at a byte boundary.

The metadata of the header has

    format    "steelyard-mask", and `version` "1"
    pattern   such as "2:4" or "0.5"
    shapes    JSON: the shape of each weight, [out, in], or [experts, out, in], by name
    base      JSON: path and hash of the weights
    made_by   JSON: how the masks were made
    sha256    of the names, shapes, pattern and bytes; verified when a file is opened

Masks are of whole matrices: a file does not depend on a layout.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from steelyard.checkpoint.formats import safetensors
from steelyard.core import files
from steelyard.core.errors import UserError
from steelyard.core.safe_parse import loads
from steelyard.sparsity.patterns import Pattern

FORMAT, VERSION = "steelyard-mask", "1"
CODED = {"2:4": 3, "1:4": 2}  # bits of a group's index


def write(
    path: Path,
    masks: Iterable[tuple[str, Tensor]],
    pattern: Pattern,
    base: dict[str, Any],
    made_by: dict[str, Any] | None = None,
) -> int:
    """Write masks (bool, of whole weights) from an iterable, packing each immediately; returns the file size."""
    packed: dict[str, Tensor] = {}
    shapes: dict[str, list[int]] = {}
    for name, mask in masks:
        packed[name], shapes[name] = pack(mask, pattern), list(mask.shape)
    about = {
        "format": FORMAT,
        "version": VERSION,
        "pattern": str(pattern),
        "shapes": json.dumps(shapes),
        "base": json.dumps(base),
        "made_by": json.dumps(made_by or {}),
        "sha256": _checksum(packed, shapes, str(pattern)),
    }
    sizes = {name: tuple(row.shape) for name, row in packed.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = files.temporary_beside(path)
    try:
        list(safetensors.write(temporary, sizes, torch.uint8, packed.values(), about))
        files.sync_file(temporary)
        temporary.replace(path)
        files.sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)
    return path.stat().st_size


def is_mask_file(path: str | Path) -> bool:
    """Whether a path is a mask file, valid or corrupt."""
    file = Path(path)
    try:
        return file.is_file() and safetensors.metadata(file).get("format") == FORMAT
    except UserError:
        return False


class MaskFile:
    """A verified mask file."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()
        if not self.path.is_file():
            raise UserError(f"there is no mask file {path}", hint="steelyard prune --save mask writes one")
        about = safetensors.metadata(self.path)
        if about.get("format") != FORMAT:
            raise UserError("this is not a mask file", where=str(path), hint="steelyard prune --save mask writes one")
        if about.get("version") != VERSION:
            raise UserError(
                f"the mask file has version {about.get('version')}, but only {VERSION} is supported",
                where=str(path),
                hint="update steelyard",
            )
        try:
            self.shapes = {str(name): _shape(sizes) for name, sizes in _json(about["shapes"])}
            self.base = dict(_json(about["base"]))
            self.made_by = dict(_json(about["made_by"]))
            claimed = about["sha256"]
            self.pattern = Pattern.parse(about["pattern"], where=str(path))
        except (KeyError, TypeError, ValueError):
            raise UserError(
                "the header of the mask file is not valid", where=str(path), hint="create or copy the file again"
            ) from None
        self._extents = safetensors.extents(self.path)
        self._check_sizes()
        packed = {name: self._extents[name].read() for name in self.shapes}
        if _checksum(packed, {name: list(shape) for name, shape in self.shapes.items()}, str(self.pattern)) != claimed:
            raise UserError(
                "the mask file is corrupt: its checksum does not match",
                where=str(path),
                hint="create or copy the file again",
            )

    def _check_sizes(self) -> None:
        wrong = set(self._extents) ^ set(self.shapes)
        wrong |= {name for name, shape in self.shapes.items() if min(shape) < 1}
        for name in self.shapes.keys() - wrong:
            size = (packed_bytes(self.shapes[name], self.pattern),)
            if self._extents[name].size != size or self._extents[name].dtype != torch.uint8:
                wrong.add(name)
        if wrong:
            raise UserError(
                f"{min(wrong)} does not match the header", where=str(self.path), hint="create or copy the file again"
            )

    def names(self) -> list[str]:
        """The matrices that have masks, by Steelyard's names."""
        return list(self.shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a weight, [out, in] or [experts, out, in]."""
        return self.shapes[name]

    def mask(self, name: str) -> Tensor:
        """True where a weight is kept."""
        return unpack(self._extents[name].read(), self.shapes[name], self.pattern)

    def packed(self, name: str) -> Tensor:
        """The packed bytes of a mask."""
        return self._extents[name].read()


def described(path: str | Path) -> dict[str, Any]:
    """The description of a mask file. Reads all of it to verify the checksum and count pruned weights."""
    masks = MaskFile(path)
    weights = sum(math.prod(masks.shape(name)) for name in masks.names())
    kept = sum(int(masks.mask(name).sum()) for name in masks.names())
    size = masks.path.stat().st_size
    return {
        "path": str(path),
        "pattern": str(masks.pattern),
        "matrices": len(masks.names()),
        "weights": weights,
        "sparsity": 1 - kept / weights if weights else 0.0,
        "bytes": size,
        "bits_a_weight": round(8 * size / weights, 4) if weights else None,
        "base": masks.base,
        "made_by": masks.made_by,
    }


def as_text(result: dict[str, Any]) -> str:
    """The description as text."""
    lines = {
        **result,
        **{f"{key}.{inner}": value for key in ("base", "made_by") for inner, value in result[key].items()},
    }
    return "\n".join(f"{key:22} {value}" for key, value in lines.items() if key not in ("base", "made_by"))


def packed_bytes(shape: tuple[int, ...], pattern: Pattern) -> int:
    """The number of bytes of a matrix's mask."""
    planes = CODED.get(str(pattern), 1)
    places = math.prod(shape) // (pattern.group if str(pattern) in CODED else 1)
    return planes * -(-places // 8)


def pack(mask: Tensor, pattern: Pattern) -> Tensor:
    """Pack a mask into bytes."""
    if not pattern.follows(mask):
        raise UserError(f"a mask does not follow {pattern}", hint="each group must keep as many weights as the pattern")
    bits = CODED.get(str(pattern))
    if bits is None:
        return _bytes([mask])
    codes = _codes(pattern)[_as_numbers(mask.cpu().reshape(-1, pattern.group))]
    return _bytes([codes >> bit & 1 for bit in range(bits)])


def unpack(packed: Tensor, shape: tuple[int, ...], pattern: Pattern) -> Tensor:
    """Unpack a mask from bytes."""
    bits = CODED.get(str(pattern))
    if bits is None:
        return _bits(packed, math.prod(shape)).bool().view(shape)
    groups = math.prod(shape) // pattern.group
    codes = torch.zeros(groups, dtype=torch.uint8)
    for bit, plane in enumerate(packed.view(bits, -1)):
        codes |= _bits(plane, groups) << bit
    candidates = pattern.candidates().bool()
    if codes.max() >= len(candidates):
        raise UserError(f"a group has the mask index {int(codes.max())}, but {pattern} has {len(candidates)} masks")
    return candidates[codes.int()].view(shape)


def _codes(pattern: Pattern) -> Tensor:
    """The index in the candidates, by the group's bits read as a number."""
    codes = torch.zeros(1 << pattern.group, dtype=torch.uint8)
    numbers = _as_numbers(pattern.candidates().bool())
    codes[numbers] = torch.arange(len(numbers), dtype=torch.uint8)
    return codes


def _as_numbers(groups: Tensor) -> Tensor:
    powers = torch.tensor([1 << place for place in range(groups.shape[1])], dtype=torch.uint8)
    return (groups * powers).sum(1, dtype=torch.int32)


def _bytes(planes: list[Tensor]) -> Tensor:
    rows = [np.packbits(plane.cpu().flatten().numpy(), bitorder="little") for plane in planes]
    return torch.from_numpy(np.concatenate(rows))


def _bits(packed: Tensor, count: int) -> Tensor:
    return torch.from_numpy(np.unpackbits(packed.numpy(), count=count, bitorder="little"))


def _checksum(packed: dict[str, Tensor], shapes: dict[str, list[int]], pattern: str) -> str:
    digest = hashlib.sha256(json.dumps([pattern, shapes]).encode())
    for row in packed.values():
        digest.update(row.numpy().data)
    return digest.hexdigest()


def _shape(sizes: list[Any]) -> tuple[int, ...]:
    shape = tuple(int(size) for size in sizes)
    if len(shape) not in (2, 3):
        raise ValueError(f"a weight has {len(shape)} dimensions")
    return shape


def _json(text: str) -> Any:
    value = loads(text)
    return value.items() if isinstance(value, dict) else value
