"""Products of few rows with a 2:4 matrix on the sparse tensor cores (`mma.sp`).

`mma.sp` multiplies 16 rows of a compressed matrix by 8 rows of inputs, 8 groups of four at a time: each thread passes
the words of its groups as they are in memory, so nothing is expanded and a product takes few instructions per group,
independent of the number of rows. Triton does not expose the instruction, so it is inline assembly here, on vectors
with one element per thread: element i of such a vector belongs to thread i.

The operands (PTX ISA, "mma.sp", m16n8k32): `g` is a thread's index in the warp divided by 4, `q` the remainder. Of
eight groups, its slots 0 to 7, thread (g, q) passes

    the pair of slot q of row g, that of row g + 8, those of slot q + 4 of both rows                        four words
    of the inputs of row g: half q % 2 of slots q / 2, q / 2 + 2, + 4 and + 6                               four words
    metadata: slots 0 to 3 (q even) or 4 to 7 (q odd) of rows g and g + 8, two bits per weight              one word

and the last from threads with q < 2, or with q > 1: an operand of the instruction selects which. The assignment of
groups to slots is free, if weights and inputs agree. Here slot s is group 32 t + 4 s + i of a piece of 64, for t from 0
to 1 and i from 0 to 3: so a thread's words for the four i are 16 contiguous bytes, followed by those of its neighbours.
Values of 8 bits are half as large; there slots q and q + 4 are groups 32 t + 8 q + i and 32 t + 8 q + 4 + i, which are
16 contiguous bytes together. (Loads of 8 bytes alone, without any product, reached 2.8 TB/s on an H200, and loads of 16
bytes with the products 3.7.)
Metadata is stored as the instruction needs it (`semi_structured.metadata_of`): for each 16 rows and each piece, four
words per thread.

Weights are read once and bypass the L1 cache, which is left to the inputs. Those of a program's first piece are read
before the kernel that computes the inputs has ended (`dependent_launch.py`). Inputs come from one address per row, and
each thread reads twice what it needs: up to 8 rows this is hidden by the weights. More rows are first reordered by
`arrange`, a kernel of one to two microseconds, and are then read like the weights.

Values of 8 bits become 16-bit floats in registers (`decode_values.py`); the scales of the rows are applied to the sums.

Rejected, by measurements on an H200: reading the next piece before the present one is multiplied (more registers; as
fast for 16-bit values; for 8-bit values 13% slower at 28672x4096, 4% faster at 4096x14336), at most 64 registers
(slower in nearly every configuration), and requesting all of a program's weights into the L2 cache at its start (3 to
31% slower).

The specification is that of `sparse_gemv.py`. Triton's interpreter does not support inline assembly, so tests replace
`_four`, `_four_once` and `_multiply` by a model of it.
"""

# Kernels have no types that mypy could check.
# mypy: disallow-untyped-defs=false, disallow-untyped-decorators=false, disallow-incomplete-defs=false
# mypy: disallow-untyped-calls=false

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from steelyard.model import dependent_launch
from steelyard.model.dependent_launch import let_next_start, wait_for_previous
from steelyard.sparsity import decode_values
from steelyard.sparsity.semi_structured import TILE, Packed

KINDS = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
COUNTERS = 1 << 16
PIECE = 64  # groups
PIECE_WORDS = 1024  # of 8 input rows
HALF = 8  # input rows of one instruction
ARRANGED_AT_ONCE = 512


@dataclass(frozen=True)
class MmaConfig:
    """How a product is split over warps and programs: tiles of matrix rows, and pieces of inputs."""

    tiles: int
    """Tiles per warp, one or two, which share the inputs that it reads."""
    across: int
    """Warps of a program that take different tiles."""
    along: int
    """Warps of a program that take different pieces; their sums are added at the end, in a fixed order."""
    parts: int = 1
    """Programs that take different pieces; the last to finish sums them, in a fixed order."""


CONFIGS = tuple(MmaConfig(*each) for each in ((2, 1, 4), (1, 4, 2), (1, 2, 4), (1, 2, 8), (1, 1, 4), (2, 2, 2)))
PARTS = (1, 2, 4, 7)
WARPS = 2048  # per product: the fastest configurations on an H200 had 1,800 to 3,600
TRIED = 6


def configs(packed: Packed) -> list[MmaConfig]:
    """The configurations that fit a matrix, the most promising first."""
    tiles, pieces = packed.outputs // TILE, packed.groups // PIECE
    found = []
    for config in (replace(config, parts=parts) for config in CONFIGS for parts in PARTS):
        programs, left = divmod(tiles, config.tiles * config.across)
        if left == 0 and pieces % (config.along * config.parts) == 0 and (config.parts == 1 or programs <= COUNTERS):
            found.append(config)
    # A piece of 8-bit values is half as many bytes, so twice as many must be under way.
    wanted = WARPS if packed.scales is None else 2 * WARPS
    return sorted(found, key=lambda config: abs(math.log2(warps(config, packed) / wanted)))[:TRIED]


def warps(config: MmaConfig, packed: Packed) -> int:
    """The number of warps of a product."""
    return packed.outputs // (TILE * config.tiles) * config.along * config.parts


def few_rows(x_BI: Tensor, packed: Packed, config: MmaConfig) -> Tensor:
    """The product of 1 to 16 rows."""
    assert packed.metadata is not None
    batch, inputs = x_BI.shape
    outputs, pieces = packed.outputs, packed.groups // PIECE
    pairs, scales, stored = decode_values.operands(packed)
    more = batch > HALF
    x = x_BI.contiguous().view(torch.int32)
    if more:
        arranged = torch.empty(pieces * 2 * PIECE_WORDS, dtype=torch.int32, device=x.device)
        early = dependent_launch.options(x.device)
        programs = len(arranged) // ARRANGED_AT_ONCE
        arrange[(programs,)](x, arranged, batch, inputs // 2, stored, ARRANGED_AT_ONCE, **early)
        x = arranged
    y_BO = x_BI.new_empty(batch, outputs)
    sums, done = y_BO, y_BO
    if config.parts > 1:
        sums = torch.empty(config.parts, batch, outputs, dtype=torch.float32, device=x.device)
        done = counters(x.device)
    multiply_few[(outputs // (TILE * config.tiles * config.across), config.parts)](
        x, pairs, scales, packed.metadata, y_BO, sums, done, batch, outputs, packed.groups, pieces,
        pieces // (config.along * config.parts), config.parts, KINDS[x_BI.dtype], stored, more, config.tiles,
        config.across, config.along, config.parts > 1, num_warps=config.across * config.along,
        **dependent_launch.options(x.device),
    )  # fmt: skip
    return y_BO


@cache
def counters(device: torch.device) -> Tensor:
    """Counters at zero, which every product resets. Products on one stream run in sequence, so they share them."""
    return torch.zeros(COUNTERS, dtype=torch.int32, device=device)


@triton.jit
def _four(address):
    """Load sixteen bytes as four words, which the kernel before may have written: from an address of `_after_wait`."""
    return tl.inline_asm_elementwise(
        "ld.global.v4.b32 {$0, $1, $2, $3}, [$4];", "=r,=r,=r,=r,l", [address],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def _after_wait(address):
    """The same address, computed after `wait_for_previous`: loads from it stay behind the wait, in any order."""
    return tl.inline_asm_elementwise(
        "mov.b64 $0, $1;", "=l,l", [address], dtype=tl.int64, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _four_once(address):
    """The same for data that no kernel writes and that is read only once: bypasses the L1 cache."""
    return tl.inline_asm_elementwise(
        "ld.global.nc.L1::no_allocate.v4.b32 {$0, $1, $2, $3}, [$4];", "=r,=r,=r,=r,l", [address],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def _multiply(t0, t1, t2, t3, a0, a1, a2, a3, b0, b1, b2, b3, metadata, late: tl.constexpr, kind: tl.constexpr):
    """Totals plus the product; `late` selects the metadata of threads with q > 1."""
    name: tl.constexpr = "bf16" if kind == tl.bfloat16 else "f16"
    return tl.inline_asm_elementwise(
        "mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32." + name + "." + name + ".f32 "
        "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9, $10, $11}, {$12, $13, $14, $15}, $16, "
        + ("0x1;" if late else "0x0;"),
        "=f,=f,=f,=f,r,r,r,r,r,r,r,r,f,f,f,f,r",
        [a0, a1, a2, a3, b0, b1, b2, b3, t0, t1, t2, t3, metadata],
        dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def _read(weights_at, metadata_at, row_bytes, pieces, piece, stored: tl.constexpr, tiles: tl.constexpr):
    """A thread's words of a piece, for each tile: metadata, and the values of both t as they are stored."""
    group_bytes: tl.constexpr = 4 if stored == "" else 2
    at = weights_at + group_bytes * 64 * piece
    first = (
        _four_once(metadata_at + 512 * piece),
        _values(at, row_bytes, stored),
        _values(at + 32 * group_bytes, row_bytes, stored),
    )
    if tiles == 1:
        return (first,)
    else:
        at += 16 * row_bytes
        second = (
            _four_once(metadata_at + 512 * (pieces + piece)),
            _values(at, row_bytes, stored),
            _values(at + 32 * group_bytes, row_bytes, stored),
        )
        return first, second


@triton.jit
def _values(address, row_bytes, stored: tl.constexpr):
    """Slots q and q + 4 of row g and of row g + 8, for the four i."""
    below = address + 8 * row_bytes
    if stored == "":
        return _four_once(address), _four_once(below), _four_once(address + 64), _four_once(below + 64)
    else:
        return _four_once(address), _four_once(below)


@triton.jit
def _decoded(words, stored: tl.constexpr, kind: tl.constexpr):
    """The same as words of two 16-bit floats: slot q of both rows, then slot q + 4."""
    if stored == "":
        return words
    else:
        row, below = words
        return (
            _four_groups(row[0], row[1], stored, kind),
            _four_groups(below[0], below[1], stored, kind),
            _four_groups(row[2], row[3], stored, kind),
            _four_groups(below[2], below[3], stored, kind),
        )


@triton.jit
def _four_groups(first, second, stored: tl.constexpr, kind: tl.constexpr):
    return (
        decode_values.as_kind(first, stored, kind),
        decode_values.as_kind(first, stored, kind, upper=True),
        decode_values.as_kind(second, stored, kind),
        decode_values.as_kind(second, stored, kind, upper=True),
    )


@triton.jit
def _inputs(address, odd, arranged: tl.constexpr, stored: tl.constexpr):
    """A thread's halves of the inputs of its four slots, for the four i."""
    if arranged:
        a, b, c, d = _four(address), _four(address + 512), _four(address + 1024), _four(address + 1536)
        return (a[0], b[0], c[0], d[0]), (a[1], b[1], c[1], d[1]), (a[2], b[2], c[2], d[2]), (a[3], b[3], c[3], d[3])
    elif stored == "":
        return (
            _halves(address, odd),
            _halves(address + 64, odd),
            _halves(address + 128, odd),
            _halves(address + 192, odd),
        )
    else:
        return (
            _halves(address, odd),
            _halves(address + 128, odd),
            _halves(address + 32, odd),
            _halves(address + 160, odd),
        )


@triton.jit
def _halves(address, odd):
    w0, w1, w2, w3 = _four(address)
    w4, w5, w6, w7 = _four(address + 16)
    return tl.where(odd, w1, w0), tl.where(odd, w3, w2), tl.where(odd, w5, w4), tl.where(odd, w7, w6)


@triton.jit
def _four_times(total, w, x, early, late, kind: tl.constexpr):
    """The products for the four i; two of them share a word of metadata, the first from the threads with q < 2."""
    t0, t1, t2, t3 = total
    t0, t1, t2, t3 = _multiply(t0, t1, t2, t3, w[0][0], w[1][0], w[2][0], w[3][0], x[0][0], x[1][0], x[2][0], x[3][0],
                               early, False, kind)  # fmt: skip
    t0, t1, t2, t3 = _multiply(t0, t1, t2, t3, w[0][1], w[1][1], w[2][1], w[3][1], x[0][1], x[1][1], x[2][1], x[3][1],
                               early, True, kind)  # fmt: skip
    t0, t1, t2, t3 = _multiply(t0, t1, t2, t3, w[0][2], w[1][2], w[2][2], w[3][2], x[0][2], x[1][2], x[2][2], x[3][2],
                               late, False, kind)  # fmt: skip
    t0, t1, t2, t3 = _multiply(t0, t1, t2, t3, w[0][3], w[1][3], w[2][3], w[3][3], x[0][3], x[1][3], x[2][3], x[3][3],
                               late, True, kind)  # fmt: skip
    return t0, t1, t2, t3


@triton.jit
def _add_piece(
    totals, held, inputs_at, odd, piece, kind: tl.constexpr, stored: tl.constexpr, more: tl.constexpr,
    tiles: tl.constexpr,
):  # fmt: skip
    """The totals of each tile, and of its second 8 rows of inputs, plus the products of a piece."""
    upper, lower, upper_more, lower_more = totals
    bytes_of_t: tl.constexpr = 4096 if more else 256
    for t in tl.static_range(2):
        at = inputs_at + bytes_of_t * (2 * piece + t)
        inputs = _inputs(at, odd, more, stored)
        if more:
            further = _inputs(at + 2048, odd, more, stored)
        e, w = held[0][0], _decoded(held[0][1 + t], stored, kind)
        upper = _four_times(upper, w, inputs, e[2 * t], e[2 * t + 1], kind)
        if more:
            upper_more = _four_times(upper_more, w, further, e[2 * t], e[2 * t + 1], kind)
        if tiles > 1:
            f, v = held[1][0], _decoded(held[1][1 + t], stored, kind)
            lower = _four_times(lower, v, inputs, f[2 * t], f[2 * t + 1], kind)
            if more:
                lower_more = _four_times(lower_more, v, further, f[2 * t], f[2 * t + 1], kind)
    return upper, lower, upper_more, lower_more


@triton.jit
def arrange(x, arranged, batch, words_of_row, stored: tl.constexpr, at_once: tl.constexpr, early: tl.constexpr):
    """Reorder 16 input rows into the order in which threads read them: piece, t, half of the rows, i, thread, slot.

    Missing rows repeat the last one; their results are not written.
    """
    if early:
        let_next_start()
        wait_for_previous()
    place = tl.program_id(0) * at_once + tl.arange(0, at_once)
    slot, q, g, i = place % 4, place // 4 % 4, place // 16 % 8, place // 128 % 4
    row = tl.minimum(8 * (place // 512 % 2) + g, batch - 1)
    slot = 2 * slot + q // 2
    group = 4 * slot if stored == "" else 8 * (slot % 4) + 4 * (slot // 4)
    group += place // 1024 * 32 + i
    tl.store(arranged + place, tl.load(x + row.to(tl.int64) * words_of_row + 2 * group + q % 2))


@triton.jit(do_not_specialize=["batch", "steps", "parts"])
def multiply_few(
    x, pairs, scales, metadata, y, sums, done, batch, outputs, groups, pieces, steps, parts,
    kind: tl.constexpr, stored: tl.constexpr, more: tl.constexpr, tiles: tl.constexpr, across: tl.constexpr,
    along: tl.constexpr, divided: tl.constexpr, early: tl.constexpr,
):  # fmt: skip
    """A program's part of a product; `more` than 8 input rows are arranged, and take a second instruction."""
    thread = tl.arange(0, 32 * across * along)
    g, q = thread % 32 // 4, thread % 4
    odd = q % 2 == 1
    first_tile = tl.program_id(0) * (tiles * across)
    tile = first_tile + thread // 32 % across * tiles
    group_bytes: tl.constexpr = 4 if stored == "" else 2
    row_bytes = group_bytes * groups.to(tl.int64)
    slot_groups: tl.constexpr = 4 if stored == "" else 8  # from one q to the next
    weights_at = (pairs + (tile * 16 + g).to(tl.int64) * groups + slot_groups * q).to(tl.int64)
    metadata_at = (metadata + tile.to(tl.int64) * pieces * 128 + thread % 32 * 4).to(tl.int64)
    if more:
        inputs_at = (x + thread % 32 * 4).to(tl.int64)
    else:
        inputs_at = (x + tl.minimum(g, batch - 1).to(tl.int64) * (2 * groups)).to(tl.int64)
        inputs_at += 8 * slot_groups * (q // 2)
    zero = tl.zeros((32 * across * along,), tl.float32)
    upper = (zero, zero, zero, zero)
    totals = (upper, upper, upper, upper)
    piece = (tl.program_id(1) * steps * along + thread // 32 // across).to(tl.int64)
    held = _read(weights_at, metadata_at, row_bytes, pieces, piece, stored, tiles)
    if early:
        let_next_start()
        wait_for_previous()
        inputs_at = _after_wait(inputs_at)
    for _ in range(1, steps):
        totals = _add_piece(totals, held, inputs_at, odd, piece, kind, stored, more, tiles)
        piece += along
        held = _read(weights_at, metadata_at, row_bytes, pieces, piece, stored, tiles)
    upper, lower, upper_more, lower_more = _add_piece(totals, held, inputs_at, odd, piece, kind, stored, more, tiles)
    whole = sums + tl.program_id(1).to(tl.int64) * batch * outputs if divided else y
    _write(upper, first_tile, 0, whole, scales, batch, outputs, stored, tiles, across, along)
    if tiles > 1:
        _write(lower, first_tile + 1, 0, whole, scales, batch, outputs, stored, tiles, across, along)
    if more:
        _write(upper_more, first_tile, 8, whole, scales, batch, outputs, stored, tiles, across, along)
        if tiles > 1:
            _write(lower_more, first_tile + 1, 8, whole, scales, batch, outputs, stored, tiles, across, along)
    if divided:
        tl.debug_barrier()  # One thread increments the counter, only after all others have written.
        if tl.atomic_add(done + tl.program_id(0), 1, sem="acq_rel") == parts - 1:
            _add_up(sums, y, first_tile * 16, batch, outputs, parts, 16 if more else 8, 16 * tiles * across)
            tl.store(done + tl.program_id(0), 0)


@triton.jit
def _write(
    total, tile, first: tl.constexpr, y, scales, batch, outputs, stored: tl.constexpr, tiles: tl.constexpr,
    across: tl.constexpr, along: tl.constexpr,
):  # fmt: skip
    """Sum over the warps that share a tile, and write 16 rows of 8."""
    threads: tl.constexpr = 32 * across
    by_warp = (tl.reshape(total[0], (along, threads)), tl.reshape(total[1], (along, threads)),
               tl.reshape(total[2], (along, threads)), tl.reshape(total[3], (along, threads)))  # fmt: skip
    whole = tl.reduce(by_warp, 0, _added)
    thread = tl.arange(0, threads)
    row = (tile + thread // 32 * tiles) * 16 + thread % 32 // 4
    for number in tl.static_range(4):
        sample = first + 2 * (thread % 4) + number % 2
        place = sample.to(tl.int64) * outputs + row + 8 * (number // 2)
        result = whole[number]
        if stored != "":
            result *= decode_values.row_scales(scales, row + 8 * (number // 2), stored)
        tl.store(y + place, result.to(y.dtype.element_ty), mask=sample < batch, cache_modifier=".cg")


@triton.jit
def _added(a0, a1, a2, a3, b0, b1, b2, b3):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3


@triton.jit
def _add_up(sums, y, first_row, batch, outputs, parts, samples: tl.constexpr, rows: tl.constexpr):
    """Sum all parts."""
    sample = tl.arange(0, samples)[:, None]
    place = sample.to(tl.int64) * outputs + first_row + tl.arange(0, rows)[None, :]
    whole = tl.zeros((samples, rows), tl.float32)
    for _ in range(parts):
        whole += tl.load(sums + place, mask=sample < batch, other=0.0, cache_modifier=".cg")
        sums += batch * outputs
    tl.store(y + place, whole.to(y.dtype.element_ty), mask=sample < batch)
