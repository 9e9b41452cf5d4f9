"""Mask files: which weights stay, in less than a bit each.

A safetensors file whose tensors are bytes (U8), one for each masked matrix and under its name. A matrix of the pattern
2:4 or 1:4 is a row of groups, row after row of the matrix, and a group is the number of its mask among
`Pattern.candidates()`: three bits for 2:4 (0.75 bits a weight), two for 1:4 (0.5). All groups' lowest bits come first,
then all second bits, then all third. Any other pattern has a bit a weight. Eight bits are a byte, the first the lowest;
each of these rows of bits begins with a byte of its own.

The header's metadata has

    format    "steelyard-mask", and `version` "1"
    pattern   such as "2:4" or "0.5"
    shapes    JSON: the shape of each matrix, [out, in], by name
    base      JSON: what the masks belong to
    made_by   JSON: how the masks came about
    sha256    of the names, shapes, pattern and bytes; it is checked when a file is opened

Masks are whole: a file knows no layout.
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
CODED = {"2:4": 3, "1:4": 2}  # bits of a group's number


def write(
    path: Path,
    masks: Iterable[tuple[str, Tensor]],
    pattern: Pattern,
    base: dict[str, Any],
    made_by: dict[str, Any] | None = None,
) -> int:
    """Write masks (bool, [out, in]) as they come, each packed at once; gives the bytes of the file."""
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
    """Whether a path is a mask file, whole or not."""
    found = Path(path)
    try:
        return found.is_file() and safetensors.metadata(found).get("format") == FORMAT
    except UserError:
        return False


class MaskFile:
    """A mask file that was found to be whole."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()
        if not self.path.is_file():
            raise UserError(f"there is no mask file {path}", hint="steelyard prune --save mask writes one")
        about = safetensors.metadata(self.path)
        if about.get("format") != FORMAT:
            raise UserError("this is no mask file", where=str(path), hint="steelyard prune --save mask writes one")
        if about.get("version") != VERSION:
            raise UserError(
                f"it is of version {about.get('version')}, and {VERSION} is known",
                where=str(path),
                hint="update steelyard",
            )
        try:
            self.shapes = {str(name): (int(rows), int(columns)) for name, (rows, columns) in _json(about["shapes"])}
            self.base = dict(_json(about["base"]))
            self.made_by = dict(_json(about["made_by"]))
            claimed = about["sha256"]
            self.pattern = Pattern.parse(about["pattern"], where=str(path))
        except (KeyError, TypeError, ValueError):
            raise UserError(
                "its header does not describe masks", where=str(path), hint="make or copy it again"
            ) from None
        self._extents = safetensors.extents(self.path)
        self._check_sizes()
        packed = {name: self._extents[name].read() for name in self.shapes}
        if _checksum(packed, {name: list(shape) for name, shape in self.shapes.items()}, str(self.pattern)) != claimed:
            raise UserError(
                "its contents do not match its checksum: it is damaged", where=str(path), hint="make or copy it again"
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
                f"{min(wrong)} is not as its header says", where=str(self.path), hint="make or copy it again"
            )

    def names(self) -> list[str]:
        """The matrices that have masks, by Steelyard's names."""
        return list(self.shapes)

    def shape(self, name: str) -> tuple[int, int]:
        """The shape of a matrix, [out, in]."""
        return self.shapes[name]

    def mask(self, name: str) -> Tensor:
        """True where a weight stays."""
        return unpack(self._extents[name].read(), self.shapes[name], self.pattern)

    def packed(self, name: str) -> Tensor:
        """The bytes of a mask, as they lie in the file."""
        return self._extents[name].read()


def described(path: str | Path) -> dict[str, Any]:
    """What a mask file is. All of it is read: the checksum is checked, and the share that is pruned is counted."""
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
    """The same for a person."""
    lines = {
        **result,
        **{f"{key}.{inner}": value for key in ("base", "made_by") for inner, value in result[key].items()},
    }
    return "\n".join(f"{key:22} {value}" for key, value in lines.items() if key not in ("base", "made_by"))


def packed_bytes(shape: tuple[int, ...], pattern: Pattern) -> int:
    """How many bytes a matrix's mask takes."""
    planes = CODED.get(str(pattern), 1)
    places = math.prod(shape) // (pattern.group if str(pattern) in CODED else 1)
    return planes * -(-places // 8)


def pack(mask: Tensor, pattern: Pattern) -> Tensor:
    """A mask as bytes."""
    if not pattern.follows(mask):
        raise UserError(f"a mask is not {pattern}", hint="every group must keep as many weights as the pattern says")
    bits = CODED.get(str(pattern))
    if bits is None:
        return _bytes([mask])
    codes = _codes(pattern)[_as_numbers(mask.cpu().reshape(-1, pattern.group))]
    return _bytes([codes >> bit & 1 for bit in range(bits)])


def unpack(packed: Tensor, shape: tuple[int, int], pattern: Pattern) -> Tensor:
    """The mask that bytes stand for."""
    bits = CODED.get(str(pattern))
    if bits is None:
        return _bits(packed, math.prod(shape)).bool().view(shape)
    groups = math.prod(shape) // pattern.group
    codes = torch.zeros(groups, dtype=torch.uint8)
    for bit, plane in enumerate(packed.view(bits, -1)):
        codes |= _bits(plane, groups) << bit
    candidates = pattern.candidates().bool()
    if codes.max() >= len(candidates):
        raise UserError(f"a group has the mask {int(codes.max())}, and {pattern} knows {len(candidates)}")
    return candidates[codes.int()].view(shape)


def _codes(pattern: Pattern) -> Tensor:
    """The place among the candidates of each group's bits read as a number."""
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


def _json(text: str) -> Any:
    value = loads(text)
    return value.items() if isinstance(value, dict) else value
