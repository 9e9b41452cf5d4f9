"""Mutations of a file's bytes, seeded: half at offsets uniform over the file, half in a field chosen uniformly.

Most bytes of a checkpoint are weights, so uniform offsets rarely reach a header. Fields are what the format says they
are where a target knows, the scalars of a text file, or the parts of a binary one: its head, its tail and the middle.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

END = 512  # Bytes at either end of a binary file that count as fields of their own.
SCALAR = re.compile(rb'"(?:[^"\\]|\\.)*"|-?\d[\d.eE+-]*|[A-Za-z_]+|[\[\]{}:,=]')
KINDS = ("flip", "flip", "flip", "byte", "truncate", "delete", "repeat", "zero", "append")

Field = tuple[int, int]


def fields_of(data: bytes) -> list[Field]:
    """Where the fields of a file are, for one whose format is not known."""
    if b"\0" not in data[:4096] and data.isascii():
        return [match.span() for match in SCALAR.finditer(data)]
    head = [(start, start + 8) for start in range(0, min(END, len(data)), 8)]
    tail = [(start, start + 8) for start in range(max(len(data) - END, 0), len(data), 8)]
    return [*head, *tail, (0, len(data))]


def mutations(data: bytes, count: int, rng: random.Random) -> Iterator[tuple[str, bytes]]:
    """`count` mutated copies, each with a description. Copies equal to the original are not among them."""
    fields = fields_of(data) or [(0, len(data))]
    for number in range(count):
        mutated = data
        while mutated == data:
            start, end = (0, len(data)) if number % 2 else rng.choice(fields)
            offset = rng.randrange(start, max(start + 1, min(end, len(data))))
            kind = rng.choice(KINDS)
            mutated = _mutated(data, kind, offset, rng)
        yield f"{kind} at {offset}", mutated


def _mutated(data: bytes, kind: str, offset: int, rng: random.Random) -> bytes:
    length = rng.choice((1, 8, 64, 512))
    before, after = data[:offset], data[offset:]
    match kind:
        case "flip":
            return before + bytes([after[0] ^ 1 << rng.randrange(8)]) + after[1:] if after else data
        case "byte":
            return before + rng.randbytes(1) + after[1:]
        case "truncate":
            return before
        case "delete":
            return before + after[length:]
        case "repeat":
            return before + after[:length] + after
        case "zero":
            return before + bytes(min(length, len(after))) + after[length:]
        case _:
            return data + rng.randbytes(length)
