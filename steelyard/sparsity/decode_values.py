"""The values of a 2:4 matrix in a Triton kernel: a group's two values are one word, of 32 bits or of 16.

A word of 32 bits has two 16-bit floats, `kind`. A word of 16 bits has two values `stored` as "int8" or "fp8". To fp32
they are decoded with integer operations:

    int8   the byte with its sign bit flipped is the mantissa of 2^23 + 128 + value, from which 2^23 + 128 is subtracted
    fp8    e4m3 has the bits of an fp16 with a shorter exponent and mantissa; shifted into place they are the value
           divided by 256, exactly, subnormal numbers included

To a word of two 16-bit floats they are decoded together, in four or five instructions of assembly:

    int8   the lower seven bits of the byte are the mantissa of 128 + bits; 128 is subtracted, or 256 if the sign bit is
           set: both are 128 with that bit in the place of the exponent's last. In fp16 the same with 1024 and 1152
    fp8    shifted into a bf16, the value times 2^-120, which is multiplied by 2^112

`row_scales` has the scale of each row, and this 256. 16-bit floats are `stored` as "" and have no scale.
"""

# Kernels have no types that mypy could check.
# mypy: disallow-untyped-defs=false, disallow-untyped-decorators=false, disallow-incomplete-defs=false
# mypy: disallow-untyped-calls=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from steelyard.sparsity.semi_structured import Packed

STORED = {torch.int8: "int8", torch.float8_e4m3fn: "fp8"}
_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
_INTEGER = tl.constexpr(0x4B000080)  # 2^23 as fp32, and the sign bit of a byte
_OFFSET = tl.constexpr(8388608.0 + 128.0)


def operands(packed: Packed) -> tuple[Tensor, Tensor, str]:
    """The values as one word per group, the scales (any tensor for 16-bit values), and how values are stored."""
    if packed.scales is None:
        return packed.values.view(torch.int32), packed.words, ""
    return packed.values.view(torch.int16), packed.scales, STORED[packed.values.dtype]


@triton.jit
def low(word, kind: tl.constexpr):
    """The lower half of a word of 32 bits."""
    return word.to(tl.int16).to(kind, bitcast=True)


@triton.jit
def high(word, kind: tl.constexpr):
    """The upper half."""
    return (word >> 16).to(tl.int16).to(kind, bitcast=True)


@triton.jit
def low_wide(word, kind: tl.constexpr):
    """The lower half as fp32; bf16 is the upper half of an fp32."""
    return (word << 16).to(tl.float32, bitcast=True) if kind == tl.bfloat16 else low(word, kind).to(tl.float32)


@triton.jit
def high_wide(word, kind: tl.constexpr):
    """The upper half as fp32."""
    return (word & -65536).to(tl.float32, bitcast=True) if kind == tl.bfloat16 else high(word, kind).to(tl.float32)


@triton.jit
def first(pair, stored: tl.constexpr, kind: tl.constexpr):
    """The first value of a group as fp32, without its scale."""
    if stored == "int8":
        return _integer(pair.to(tl.int32) & 0xFF)
    else:
        return low_wide(pair, kind) if stored == "" else low_wide(_halves(pair), tl.float16)


@triton.jit
def second(pair, stored: tl.constexpr, kind: tl.constexpr):
    """The second value of a group."""
    if stored == "int8":
        return _integer((pair.to(tl.int32) >> 8) & 0xFF)
    else:
        return high_wide(pair, kind) if stored == "" else high_wide(_halves(pair), tl.float16)


@triton.jit
def _integer(byte):
    return (byte ^ _INTEGER).to(tl.float32, bitcast=True) - _OFFSET


@triton.jit
def _halves(pair):
    """Two fp8 values as one word of two fp16."""
    word = pair.to(tl.int32)
    word = (word & 0xFF) | ((word & 0xFF00) << 8)
    return ((word & 0x00800080) << 8) | ((word & 0x007F007F) << 7)


@triton.jit
def row_scales(scales, row, stored: tl.constexpr):
    """What the decoded values of a row are multiplied by."""
    scale = tl.load(scales + row)
    return scale * 256.0 if stored == "fp8" else scale


@triton.jit
def as_kind(pair, stored: tl.constexpr, kind: tl.constexpr, upper: tl.constexpr = False):
    """A group's two values as one word of two 16-bit floats, without their scale, which is exact.

    The group is the lower half of `pair`, or the upper half of a word of 32 bits.
    """
    if stored == "":
        return pair
    elif stored == "fp8" and kind == tl.float16:
        return _halves(pair >> 16 if upper else pair)
    elif _INTERPRETED:
        pair = pair >> 16 if upper else pair
        return _joined(first(pair, stored, kind), second(pair, stored, kind), kind)
    elif stored == "int8":
        return _two_integers(pair.to(tl.int32), kind, upper)
    else:
        return _two_fp8(pair.to(tl.int32), upper)


@triton.jit
def _two_integers(word, kind: tl.constexpr, upper: tl.constexpr):
    # prmt: the two bytes become the lower bytes of both halves. lop3 0xEA: (a & b) | c. The constants are 1, 128 and
    # -128 in bf16, or 1, 1024 and -1024 in fp16, in both halves.
    bytes_: tl.constexpr = "0x4342" if upper else "0x4140"
    is_bf16: tl.constexpr = kind == tl.bfloat16
    one: tl.constexpr = "0x3F803F80" if is_bf16 else "0x3C003C00"
    positive: tl.constexpr = "0x43004300" if is_bf16 else "0x64006400"
    negative: tl.constexpr = "0xC300C300" if is_bf16 else "0xE400E400"
    fma: tl.constexpr = "fma.rn.bf16x2" if is_bf16 else "fma.rn.f16x2"
    return tl.inline_asm_elementwise(
        "{ .reg .b32 p, t, c, one; prmt.b32 p, $1, 0, " + bytes_ + "; mov.b32 one, " + one + "; "
        "lop3.b32 t, p, 0x007F007F, " + positive + ", 0xEA; lop3.b32 c, p, 0x00800080, " + negative + ", 0xEA; "
        + fma + " $0, t, one, c; }",
        "=r,r", [word], dtype=tl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def _two_fp8(word, upper: tl.constexpr):
    # prmt: the two bytes become the upper bytes of both halves.
    bytes_: tl.constexpr = "0x3424" if upper else "0x1404"
    return tl.inline_asm_elementwise(
        "{ .reg .b32 p, t, factor, zero; prmt.b32 p, $1, 0, " + bytes_ + "; shr.b32 t, p, 4; "
        "and.b32 t, t, 0x07F007F0; lop3.b32 t, p, 0x80008000, t, 0xEA; mov.b32 factor, 0x77807780; "
        "mov.b32 zero, 0x80008000; fma.rn.bf16x2 $0, t, factor, zero; }",
        "=r,r", [word], dtype=tl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def scaled(pair, scale, stored: tl.constexpr, kind: tl.constexpr):
    """The same with the scale, rounded."""
    return _joined(
        (first(pair, stored, kind) * scale).to(kind).to(tl.float32),
        (second(pair, stored, kind) * scale).to(kind).to(tl.float32),
        kind,
    )


@triton.jit
def _joined(lower, upper, kind: tl.constexpr):
    """Two fp32 numbers that `kind` represents exactly, as one word."""
    if kind == tl.bfloat16:
        bits = (lower.to(tl.uint32, bitcast=True) >> 16).to(tl.int32, bitcast=True)
        return bits | (upper.to(tl.int32, bitcast=True) & -65536)
    else:
        bits = lower.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        return bits | (upper.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) << 16)
