"""Kernels for products of few rows with a compressed 2:4 matrix, and for expanding it to the dense matrix.

With 1 to 16 rows a product is limited by reading the weights. Dense weights are 2 bytes each, compressed ones 9/8: at
most 1.78 times faster. That requires that every load is wide and fully used.

The kept weights are stored as in the file: row-major, two per group of four, so a group is one 32-bit word, and
adjacent threads read adjacent 16 bytes. The positions are stored not as two indices but as the mask of the group, also
four bits: a kernel can test a bit directly, but would have to extract an index. Eight masks make a word. They are not
those of adjacent groups, which other threads need, but of groups that are 16 apart:

    word c of block k of a row has, in bits 4s to 4s + 3, the mask of group 128 k + 16 s + c        (c < 16, s < 8)

So a thread that holds words c to c + 3 uses them for its own groups in eight steps of 16 bytes of weights, and threads
exchange no words. A block is 512 inputs; the last block is padded with empty masks.

There are two kernels for products. `_vectors` takes one row of inputs and accumulates in fp32: x is read as 64-bit
words, one per group, and the mask's bits select the x of each weight. Compiled for Hopper that is 16 to 20 instructions
per group, 8 to 10 microseconds at 14336x4096, where memory takes 16. `_tiles` takes up to 16 rows: a group's weights
become four tiles, one per member, with zeros where the mask is zero, and use the tensor cores; 18 to 24 instructions,
independent of the number of rows. If the matrix has too few rows to occupy the GPU (4096x14336), the inputs are also
split over programs (`parts`). The last program to finish sums the parts, always in the same order, so results are
reproducible bit for bit. For matrices of whole tiles and blocks, `sparse_mma.py` replaces `_tiles`, and is faster if
one of its configurations divides the matrix well.

Rejected for `_tiles`, judged by the compiled code: masks in words of 16 or 8 bits, for smaller steps (each bit test
takes two instructions); some of a word's steps at a time, shifted by a run-time value (the compiler then moves every
tile through shared memory); tiles of two members (no packing, but every tile goes through shared memory).

Values of 8 bits make a group one 16-bit word, and the matrix 5/16 of its size in bf16. They are decoded in registers
(`decode_values.py`), and the scales of the rows are applied to the sums.

`semi_structured.dense` and a plain product are the specification. This module is imported only on machines with a GPU.
"""

# Kernels have no types that mypy could check.
# mypy: disallow-untyped-defs=false, disallow-untyped-decorators=false, disallow-incomplete-defs=false
# mypy: disallow-untyped-calls=false

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from steelyard.model import dependent_launch
from steelyard.model.dependent_launch import let_next_start, wait_for_previous
from steelyard.sparsity import decode_values, sparse_mma
from steelyard.sparsity.decode_values import high, high_wide, low, low_wide
from steelyard.sparsity.semi_structured import BLOCK_GROUPS, BLOCK_WORDS, Packed

_WORDS, _GROUPS = tl.constexpr(BLOCK_WORDS), tl.constexpr(BLOCK_GROUPS)
_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@dataclass(frozen=True)
class GemvConfig:
    """A configuration of a product: kernel, matrix rows and input blocks per program, and the split of the inputs."""

    kernel: Literal["vectors", "tiles"]
    rows: int
    blocks: int = 1
    """Adjacent blocks; more than one only in `_vectors`."""
    warps: int = 4
    stages: int = 1
    """From 2 on, loads are buffered in shared memory; from 3 on, they overlap with computation."""
    parts: int = 1
    """The number of parts that the inputs are split into."""


# The configurations that are measured for a new shape, with and without a split. A program of `_tiles` takes
# (stages - 1) * (576 * rows + 16384) bytes of a multiprocessor's shared memory, of which Hopper has 227 KiB.
VECTORS = (
    GemvConfig("vectors", 32), GemvConfig("vectors", 16, blocks=2), GemvConfig("vectors", 64),
    GemvConfig("vectors", 8, blocks=4), GemvConfig("vectors", 16, warps=2), GemvConfig("vectors", 32, stages=3),
)  # fmt: skip
TILES = (
    GemvConfig("tiles", 64, stages=3), GemvConfig("tiles", 64, stages=2), GemvConfig("tiles", 32, warps=2, stages=3),
    GemvConfig("tiles", 32, warps=2, stages=2), GemvConfig("tiles", 128, warps=8, stages=3),
    GemvConfig("tiles", 128, stages=2),
)  # fmt: skip
PARTS = (1, 2, 4, 7)
PROGRAMS = (100, 1200)  # per product: fewer leave multiprocessors idle, more only sum more parts


def configs(rows: int, packed: Packed) -> list[GemvConfig | sparse_mma.MmaConfig]:
    """The configurations for a number of input rows and a matrix; the first is a good guess."""
    in_cores = [] if packed.metadata is None or _INTERPRETED else sparse_mma.configs(packed)
    blocks = packed.words.shape[1] // BLOCK_WORDS
    fewest, most = PROGRAMS
    found: list[tuple[int, GemvConfig]] = []
    for config in {1: VECTORS, 2: (*TILES, *VECTORS[:3])}.get(rows, TILES):
        programs = triton.cdiv(packed.outputs, config.rows) * (rows if config.kernel == "vectors" else 1)
        for parts in PARTS:
            # Split only if there are enough blocks and not too many programs.
            if parts == 1 or (parts * config.blocks <= blocks and programs * parts <= min(most, sparse_mma.COUNTERS)):
                found.append((programs * parts, replace(config, parts=parts)))
    enough = [config for programs, config in found if programs >= fewest] or [config for _, config in found]
    # If one of them fits the matrix well, the others are only a fallback for GPUs without the instruction.
    is_enough = rows > 1 and bool(in_cores) and sparse_mma.warps(in_cores[0], packed) >= sparse_mma.WARPS // 2
    return [*in_cores, *(enough[:1] if is_enough else enough)]


def few_rows(x_BI: Tensor, packed: Packed, config: GemvConfig | sparse_mma.MmaConfig) -> Tensor:
    """The product of 1 to 16 rows, with one of the configurations."""
    if isinstance(config, sparse_mma.MmaConfig):
        return sparse_mma.few_rows(x_BI, packed, config)
    batch, inputs = x_BI.shape
    outputs, words = packed.words.shape
    y_BO = x_BI.new_empty(batch, outputs)
    x = x_BI.contiguous().view(torch.int64)
    steps = triton.cdiv(words, config.blocks * BLOCK_WORDS * config.parts)
    # No mask is needed if blocks, parts and rows divide evenly.
    even = (
        words == steps * config.parts * config.blocks * BLOCK_WORDS
        and inputs == 4 * BLOCK_GROUPS // BLOCK_WORDS * words
        and outputs % config.rows == 0
    )
    programs = triton.cdiv(outputs, config.rows)
    repeats = batch if config.kernel == "vectors" else 1
    sums, done = y_BO, y_BO
    if config.parts > 1:
        assert programs * repeats <= sparse_mma.COUNTERS, f"{outputs} outputs are too many to split the inputs as well"
        sums = torch.empty(config.parts, batch, outputs, dtype=torch.float32, device=x_BI.device)
        done = sparse_mma.counters(x_BI.device)
    kernel = _tiles if config.kernel == "tiles" else _vectors
    pairs, scales, stored = decode_values.operands(packed)
    kernel[(programs, repeats, config.parts)](
        x, pairs, scales, packed.words, y_BO, sums, done, batch, outputs, inputs // 4, words, steps,
        config.parts, sparse_mma.KINDS[x_BI.dtype], stored, config.rows, config.blocks, even, config.stages,
        config.parts > 1, num_warps=config.warps, num_stages=config.stages, **dependent_launch.options(x_BI.device),
    )  # fmt: skip
    return y_BO


def expand(packed: Packed, dtype: torch.dtype | None = None) -> Tensor:
    """Expand to the dense matrix with a kernel; 8-bit values need the dtype of the matrix."""
    dtype = packed.values.dtype if packed.scales is None else dtype
    assert dtype is not None
    whole = packed.values.new_empty(packed.outputs, packed.groups * 4, dtype=dtype)
    rows = 32
    words = packed.words.shape[1]
    pairs, scales, stored = decode_values.operands(packed)
    _expand[(triton.cdiv(packed.outputs, rows), words // BLOCK_WORDS)](
        pairs, scales, packed.words, whole.view(torch.int64), packed.outputs, packed.groups, words,
        sparse_mma.KINDS[dtype], stored, rows, num_warps=4,
    )  # fmt: skip
    return whole


@triton.jit
def _bit(words, place: tl.constexpr):
    bit: tl.constexpr = 1 << place if place < 31 else -(1 << 31)
    return (words & bit) != 0


@triton.jit
def _dot(a, b, total):
    if _INTERPRETED:  # The interpreter would multiply the bits of bf16 as integers.
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total)
    return tl.dot(a, b, total)


@triton.jit(do_not_specialize=["batch", "steps", "parts"])
def _vectors(
    x, pairs, scales, words, y, sums, done, batch, outputs, groups, word_count, steps, parts,
    kind: tl.constexpr, stored: tl.constexpr, rows: tl.constexpr, blocks: tl.constexpr, even: tl.constexpr,
    stages: tl.constexpr, divided: tl.constexpr, early: tl.constexpr,
):  # fmt: skip
    if early:
        let_next_start()
        wait_for_previous()
    columns: tl.constexpr = _WORDS * blocks
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    safe = row if even else tl.minimum(row, outputs - 1)
    words += safe.to(tl.int64)[:, None] * word_count
    pairs += safe.to(tl.int64)[:, None] * groups
    x += tl.program_id(1).to(tl.int64) * groups
    total = tl.zeros((rows, columns), tl.float32)
    first = tl.program_id(2) * steps * columns
    for step in tl.range(0, steps, num_stages=stages):
        word = first + step * columns + tl.arange(0, columns)
        group = word // _WORDS * _GROUPS + word % _WORDS
        if even:
            masks = tl.load(words + word[None, :], eviction_policy="evict_first")
        else:
            masks = tl.load(words + word[None, :], mask=(word < word_count)[None, :], other=0)
        for s in tl.static_range(8):
            at = group + _WORDS * s
            if even:
                pair = tl.load(pairs + at[None, :], eviction_policy="evict_first")
            else:
                pair = tl.load(pairs + at[None, :], mask=(at < groups)[None, :], other=0)
            if blocks > 2:  # A load per row costs less than broadcasting one load to all threads.
                wide = at[None, :] + 0 * row[:, None]
                four = tl.load(x + wide) if even else tl.load(x + wide, mask=wide < groups, other=0)
            else:
                one = tl.load(x + at) if even else tl.load(x + at, mask=at < groups, other=0)
                four = one[None, :]
            front, back = four.to(tl.int32), (four >> 32).to(tl.int32)
            x0, x1, x2, x3 = (low_wide(front, kind), high_wide(front, kind),
                              low_wide(back, kind), high_wide(back, kind))  # fmt: skip
            of_first = tl.where(_bit(masks, 4 * s), x0, tl.where(_bit(masks, 4 * s + 1), x1, x2))
            of_second = tl.where(_bit(masks, 4 * s + 3), x3, tl.where(_bit(masks, 4 * s + 2), x2, x1))
            total += decode_values.first(pair, stored, kind) * of_first
            total += decode_values.second(pair, stored, kind) * of_second
    whole = tl.sum(total, 1)
    if stored != "":
        whole *= decode_values.row_scales(scales, safe, stored)
    place = tl.program_id(1).to(tl.int64) * outputs + row
    counter = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    _settle(whole, place, row < outputs, y, sums, done + counter, batch * outputs, parts, divided)


@triton.jit(do_not_specialize=["batch", "steps", "parts"])
def _tiles(
    x, pairs, scales, words, y, sums, done, batch, outputs, groups, word_count, steps, parts,
    kind: tl.constexpr, stored: tl.constexpr, rows: tl.constexpr, blocks: tl.constexpr, even: tl.constexpr,
    stages: tl.constexpr, divided: tl.constexpr, early: tl.constexpr,
):  # fmt: skip
    if early:
        let_next_start()
        wait_for_previous()
    columns: tl.constexpr = _WORDS * blocks
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    safe = row if even else tl.minimum(row, outputs - 1)
    words += safe.to(tl.int64)[:, None] * word_count
    pairs += safe.to(tl.int64)[:, None] * groups
    sample = tl.arange(0, 16)
    is_sample = (sample < batch)[:, None]
    x += sample.to(tl.int64)[:, None] * groups
    total = tl.zeros((16, rows), tl.float32)
    first = tl.program_id(2) * steps * columns
    for step in tl.range(0, steps, num_stages=stages):
        word = first + step * columns + tl.arange(0, columns)
        group = word // _WORDS * _GROUPS + word % _WORDS
        if even:
            masks = tl.load(words + word[None, :], eviction_policy="evict_first")
        else:
            masks = tl.load(words + word[None, :], mask=(word < word_count)[None, :], other=0)
        for s in tl.static_range(8):
            at = group + _WORDS * s
            if even:
                pair = tl.load(pairs + at[None, :], eviction_policy="evict_first")
                four = tl.load(x + at[None, :], mask=is_sample, other=0)
            else:
                pair = tl.load(pairs + at[None, :], mask=(at < groups)[None, :], other=0)
                four = tl.load(x + at[None, :], mask=is_sample & (at < groups)[None, :], other=0)
            front, back = _spread(decode_values.as_kind(pair, stored, kind), masks, s)
            x_front, x_back = four.to(tl.int32), (four >> 32).to(tl.int32)
            total = _dot(low(x_front, kind), tl.trans(low(front, kind)), total)
            total = _dot(high(x_front, kind), tl.trans(high(front, kind)), total)
            total = _dot(low(x_back, kind), tl.trans(low(back, kind)), total)
            total = _dot(high(x_back, kind), tl.trans(high(back, kind)), total)
    if stored != "":
        total *= decode_values.row_scales(scales, safe, stored)[None, :]
    place = sample.to(tl.int64)[:, None] * outputs + row[None, :]
    here = is_sample & (row < outputs)[None, :]
    _settle(total, place, here, y, sums, done + tl.program_id(0), batch * outputs, parts, divided)


@triton.jit
def _spread(pair, masks, s: tl.constexpr):
    """A group's two weights at their positions among four, as two words of two."""
    front = tl.where(_bit(masks, 4 * s), pair, pair << 16)
    front = tl.where(_bit(masks, 4 * s + 1), front, front & 0xFFFF)
    upper = (pair.to(tl.uint32, bitcast=True) >> 16).to(tl.int32, bitcast=True)
    back = tl.where(_bit(masks, 4 * s + 3), pair, upper)
    back = tl.where(_bit(masks, 4 * s + 2), back, back & -65536)
    return front, back


@triton.jit
def _settle(total, place, here, y, sums, counter, size, parts, divided: tl.constexpr):
    """Write a product, or a part of it; the last program sums the parts and resets the counter."""
    if not divided:
        tl.store(y + place, total.to(y.dtype.element_ty), mask=here)
    else:
        part = tl.program_id(2).to(tl.int64)
        tl.store(sums + part * size + place, total, mask=here, cache_modifier=".cg")
        tl.debug_barrier()  # One thread increments the counter, only after all others have written.
        if tl.atomic_add(counter, 1, sem="acq_rel") == parts - 1:
            whole = tl.zeros_like(total)
            for number in range(parts):
                whole += tl.load(sums + number * size + place, mask=here, other=0.0, cache_modifier=".cg")
            tl.store(y + place, whole.to(y.dtype.element_ty), mask=here)
            tl.store(counter, 0)


@triton.jit
def _expand(
    pairs, scales, words, whole, outputs, groups, word_count, kind: tl.constexpr, stored: tl.constexpr,
    rows: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    here = (row < outputs)[:, None]
    word = tl.program_id(1) * _WORDS + tl.arange(0, _WORDS)
    masks = tl.load(words + row.to(tl.int64)[:, None] * word_count + word[None, :], mask=here, other=0)
    first = row.to(tl.int64)[:, None] * groups
    for s in tl.static_range(8):
        group = tl.program_id(1) * _GROUPS + s * _WORDS + tl.arange(0, _WORDS)
        there = here & (group < groups)[None, :]
        pair = tl.load(pairs + first + group[None, :], mask=there, other=0)
        if stored != "":
            scale = decode_values.row_scales(scales, tl.minimum(row, outputs - 1), stored)
            pair = decode_values.scaled(pair, scale[:, None], stored, kind)
        front, back = _spread(pair, masks, s)
        both = (back.to(tl.int64) << 32) | (front.to(tl.int64) & 0xFFFFFFFF)
        tl.store(whole + first + group[None, :], both, mask=there)
