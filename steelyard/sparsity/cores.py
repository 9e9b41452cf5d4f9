"""Few rows with a 2:4 matrix through the tensor cores' own instruction for such matrices.

`mma.sp` multiplies 16 rows of a compressed matrix by 8 rows of inputs, 8 groups of four at a time: each thread hands in
the words of its groups as they lie in memory, so nothing is spread out and a product takes few instructions a group,
whatever the number of rows. Triton has no word for the instruction. It is written here as assembler, between vectors
that have one element for each thread: element i of such a vector is thread i's.

What the instruction wants (PTX ISA, "mma.sp", m16n8k32). Of a thread, `g` is its number in the warp divided by 4, `q`
the remainder. Of eight groups, its slots 0 to 7, thread (g, q) hands in

    the pair of slot q of row g, that of row g + 8, those of slot q + 4 of both rows                        four words
    of the inputs of row g: half q % 2 of slots q / 2, q / 2 + 2, + 4 and + 6                               four words
    places: slots 0 to 3 (q even) or 4 to 7 (q odd) of rows g and g + 8, two bits a weight                  one word

and the last from threads with q < 2, or with q > 1: the instruction says which. Which groups are called slots is free,
if weights and inputs agree. Here slot s is group 32 t + 4 s + i of a block of 128, for t and i from 0 to 3 one after
the other: so a thread's words for the four i are 16 bytes in a row, and those of its neighbours follow. Places are kept
as the instruction wants them (`compressed.places_of`): for each 16 rows and each block, eight words of a thread.

Several warps of a program take blocks in turn, and their sums are added up at the end, in one order.

The twin is that of `decode.py`; the interpreter knows no assembler, so tests put a model of it in the place of `_four`
and `_multiply`.
"""

# Kernels have no types that mypy could check.
# mypy: disallow-untyped-defs=false, disallow-untyped-decorators=false, disallow-incomplete-defs=false
# mypy: disallow-untyped-calls=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from steelyard.sparsity.compressed import TILE

KINDS = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def few_rows(x_BI: Tensor, values: Tensor, places: Tensor, tiles: int, warps: int) -> Tensor:
    """The product of 1 to 16 rows; a program takes so many tiles of the matrix's rows."""
    batch, inputs = x_BI.shape
    outputs, blocks = len(values), places.shape[1]
    y_BO = x_BI.new_empty(batch, outputs)
    multiply_few[(outputs // (TILE * tiles),)](
        x_BI.contiguous().view(torch.int64), values.view(torch.int32), places, y_BO, batch, outputs, inputs // 4,
        blocks, triton.cdiv(blocks, warps), KINDS[x_BI.dtype], batch > 8, tiles, warps, blocks % warps == 0,
        num_warps=warps,
    )  # fmt: skip
    return y_BO


@triton.jit
def _four(address):
    """Sixteen bytes, as four words."""
    return tl.inline_asm_elementwise(
        "ld.global.nc.v4.b32 {$0, $1, $2, $3}, [$4];", "=r,=r,=r,=r,l", [address],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def _four_if(address, there):
    """The same, or zeros."""
    return tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.b32 p, $5, 0; mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0; "
        "@p ld.global.nc.v4.b32 {$0, $1, $2, $3}, [$4]; }", "=&r,=&r,=&r,=&r,l,r", [address, there.to(tl.int32)],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def _multiply(t0, t1, t2, t3, a0, a1, a2, a3, b0, b1, b2, b3, places, late: tl.constexpr, kind: tl.constexpr):
    """Totals plus the product; `late` says that the places are those of threads with q > 1."""
    name: tl.constexpr = "bf16" if kind == tl.bfloat16 else "f16"
    return tl.inline_asm_elementwise(
        "mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32." + name + "." + name + ".f32 "
        "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9, $10, $11}, {$12, $13, $14, $15}, $16, "
        + ("0x1;" if late else "0x0;"),
        "=f,=f,=f,=f,r,r,r,r,r,r,r,r,f,f,f,f,r",
        [a0, a1, a2, a3, b0, b1, b2, b3, t0, t1, t2, t3, places],
        dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def _weights(address, row_bytes, there, even: tl.constexpr):
    """A thread's words of a tile: slots q and q + 4 of row g and of row g + 8, for the four i."""
    below = address + 8 * row_bytes
    if even:
        return _four(address), _four(below), _four(address + 64), _four(below + 64)
    else:
        return (
            _four_if(address, there),
            _four_if(below, there),
            _four_if(address + 64, there),
            _four_if(below + 64, there),
        )


@triton.jit
def _inputs(address, odd):
    """A thread's halves of the inputs of its four slots, for the four i."""
    return _halves(address, odd), _halves(address + 64, odd), _halves(address + 128, odd), _halves(address + 192, odd)


@triton.jit
def _halves(address, odd):
    w0, w1, w2, w3 = _four(address)
    w4, w5, w6, w7 = _four(address + 16)
    return tl.where(odd, w1, w0), tl.where(odd, w3, w2), tl.where(odd, w5, w4), tl.where(odd, w7, w6)


@triton.jit
def _four_times(total, w, x, early, late, kind: tl.constexpr):
    """The products for the four i; two of them share a word of places, the first with the threads of q < 2."""
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


@triton.jit(do_not_specialize=["batch", "steps"])
def multiply_few(
    x, pairs, places, y, batch, outputs, groups, blocks, steps,
    kind: tl.constexpr, more: tl.constexpr, tiles: tl.constexpr, warps: tl.constexpr, even: tl.constexpr,
):  # fmt: skip
    """One program for one or two tiles of the matrix; `more` than 8 rows of inputs take a second product."""
    thread = tl.arange(0, 32 * warps)
    g, q = thread % 32 // 4, thread % 4
    odd = q % 2 == 1
    tile = tl.program_id(0) * tiles
    row_bytes = 4 * groups.to(tl.int64)
    weights_at = (pairs + (tile * 16 + g).to(tl.int64) * groups + 4 * q).to(tl.int64)
    places_at = (places + tile.to(tl.int64) * blocks * 256 + thread % 32 * 4).to(tl.int64)
    first_at = (x + tl.minimum(g, batch - 1).to(tl.int64) * groups + 4 * (q // 2)).to(tl.int64)
    second_at = (x + tl.minimum(g + 8, batch - 1).to(tl.int64) * groups + 4 * (q // 2)).to(tl.int64)
    zero = tl.zeros((32 * warps,), tl.float32)
    upper = (zero, zero, zero, zero)
    lower, upper_more, lower_more = upper, upper, upper
    for step in range(steps):
        block = step * warps + thread // 32
        there = block < blocks
        block = (block if even else tl.minimum(block, blocks - 1)).to(tl.int64)
        for half in tl.static_range(2):
            at = 2 * block + half
            e = _four(places_at + 512 * at)
            if tiles > 1:
                f = _four(places_at + 1024 * blocks + 512 * at)
            for t in tl.static_range(2):
                w = _weights(weights_at + 256 * at + 128 * t, row_bytes, there, even)
                if tiles > 1:
                    v = _weights(weights_at + 16 * row_bytes + 256 * at + 128 * t, row_bytes, there, even)
                inputs = _inputs(first_at + 512 * at + 256 * t, odd)
                upper = _four_times(upper, w, inputs, e[2 * t], e[2 * t + 1], kind)
                if tiles > 1:
                    lower = _four_times(lower, v, inputs, f[2 * t], f[2 * t + 1], kind)
                if more:
                    inputs = _inputs(second_at + 512 * at + 256 * t, odd)
                    upper_more = _four_times(upper_more, w, inputs, e[2 * t], e[2 * t + 1], kind)
                    if tiles > 1:
                        lower_more = _four_times(lower_more, v, inputs, f[2 * t], f[2 * t + 1], kind)
    _write(upper, tile, 0, y, batch, outputs, warps)
    if tiles > 1:
        _write(lower, tile + 1, 0, y, batch, outputs, warps)
    if more:
        _write(upper_more, tile, 8, y, batch, outputs, warps)
        if tiles > 1:
            _write(lower_more, tile + 1, 8, y, batch, outputs, warps)


@triton.jit
def _write(total, tile, first: tl.constexpr, y, batch, outputs, warps: tl.constexpr):
    """Add up the warps' sums, and put 16 rows of 8 where they belong."""
    by_warp = (tl.reshape(total[0], (warps, 32)), tl.reshape(total[1], (warps, 32)),
               tl.reshape(total[2], (warps, 32)), tl.reshape(total[3], (warps, 32)))  # fmt: skip
    whole = tl.reduce(by_warp, 0, _added)
    lane = tl.arange(0, 32)
    for number in tl.static_range(4):
        sample = first + 2 * (lane % 4) + number % 2
        place = sample.to(tl.int64) * outputs + tile * 16 + lane // 4 + 8 * (number // 2)
        tl.store(y + place, whole[number].to(y.dtype.element_ty), mask=sample < batch)


@triton.jit
def _added(a0, a1, a2, a3, b0, b1, b2, b3):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3
