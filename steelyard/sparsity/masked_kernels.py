"""Masked weights as Triton kernels: noise, softmax, mask and product in one kernel, and their gradient in another.

`steelyard.sparsity.gumbel` is the specification; the tests compare these kernels with it. The backward pass draws the
noise again, so nothing is stored between the passes except what autograd stores for the product anyway: weight * mask
in the weight's dtype, two bytes per weight in bf16, which the gradient of the layer's input needs.

Memory traffic in bytes per weight, with bf16 weights and fp32 logits of six candidates (6 / 4 * 4 = 6 per weight):

    forward    weight 2 + logits 6 read, product 2 written                            10
    backward   gradient 2 + weight 2 + logits 6 read, gradient of the logits 6 written   16

At 4.3 TB/s that is 0.10 ms for 4096x4096 and 0.27 ms for 11008x4096, in addition to three matrix products of about 0.55
and 1.42 ms in total: 1.19 times a dense trainable layer, if memory-bound. Compiled for Hopper a pair of groups takes
about 480 instructions forward and 590 backward, 39 of them special functions (two logarithms and a power for each
candidate): 0.03 and 0.04 ms for 4096x4096 at one instruction per cycle. Memory traffic hides both.

A thread takes two adjacent groups: eight weights are 16 bytes, their logits three times 16 bytes, so every access has
the maximal width although six candidates are not a power of two. Scale, temperature, weight_reg and the draw are read
from the device: no step synchronises with the host or recompiles. The operators are opaque to torch.compile. This
module is imported only on machines with a GPU, since others may have no Triton.
"""

# Kernels have no types that mypy could check.
# mypy: disallow-untyped-defs=false, disallow-untyped-decorators=false, disallow-incomplete-defs=false
# mypy: disallow-untyped-calls=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from steelyard.sparsity.gumbel import CANDIDATE_STEP, FACTORS, GROUP_STEP, WORD, GroupOffset

BLOCK, WARPS = 256, 8  # pairs of groups per program, and its warps: one pair per thread
GROUP = 4
CANDIDATES = (6, 4)  # of 2:4 and of 1:4
_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
_FACTOR0, _FACTOR1 = tl.constexpr(FACTORS[0]), tl.constexpr(FACTORS[1])
_GROUP_STEP = tl.constexpr(GROUP_STEP)
_STEP1, _STEP2, _STEP3, _STEP4, _STEP5 = (tl.constexpr(n * CANDIDATE_STEP % WORD) for n in range(1, 6))


def supports(weight_OI: Tensor, logits_OGC: Tensor) -> bool:
    """Whether the kernels support these tensors: 2:4 or 1:4, an even number of groups, contiguous."""
    return (
        logits_OGC.shape[-1] in CANDIDATES
        and weight_OI.numel() == logits_OGC.shape[0] * logits_OGC.shape[1] * GROUP
        and weight_OI.numel() % (2 * GROUP) == 0
        and weight_OI.is_contiguous()
        and logits_OGC.is_contiguous()
    )


def masked_weight(
    weight_OI: Tensor,
    logits_OGC: Tensor,
    candidates_CM: Tensor,
    draw_2: Tensor,
    anneal_3: Tensor,
    salt: tuple[int, int],
    offset: GroupOffset,
    hard: bool,
) -> Tensor:
    """weight * mask, as in `gumbel.masked_weight`; only the logits get a gradient."""
    product: Tensor = _masked_weight(
        weight_OI, logits_OGC, draw_2, anneal_3, *salt, offset.first_row, offset.first_group, offset.groups, hard
    )
    return product


@torch.library.custom_op("steelyard::masked_weight", mutates_args=())
def _masked_weight(
    weight: Tensor, logits: Tensor, draw: Tensor, anneal: Tensor,
    salt0: int, salt1: int, first_row: int, first_group: int, groups: int, hard: bool,
) -> Tensor:  # fmt: skip
    product = torch.empty_like(weight)
    rows, groups_here, candidates = logits.shape
    pairs = rows * groups_here // 2
    _forward[(triton.cdiv(pairs, BLOCK),)](
        weight, logits, product, draw, anneal, salt0, salt1, pairs, groups_here, first_row, first_group, groups,
        candidates, groups_here == groups, hard, BLOCK, num_warps=WARPS,
    )  # fmt: skip
    return product


@torch.library.custom_op("steelyard::masked_weight_backward", mutates_args=())
def _masked_weight_backward(
    gradient: Tensor, weight: Tensor, logits: Tensor, draw: Tensor, anneal: Tensor,
    salt0: int, salt1: int, first_row: int, first_group: int, groups: int, hard: bool,
) -> Tensor:  # fmt: skip
    of_logits = torch.empty_like(logits)
    rows, groups_here, candidates = logits.shape
    pairs = rows * groups_here // 2
    _backward[(triton.cdiv(pairs, BLOCK),)](
        gradient, weight, logits, of_logits, draw, anneal, salt0, salt1, pairs, groups_here, first_row, first_group,
        groups, candidates, groups_here == groups, hard, BLOCK, num_warps=WARPS,
    )  # fmt: skip
    return of_logits


@_masked_weight.register_fake
def _(weight: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(weight)


@_masked_weight_backward.register_fake
def _(gradient: Tensor, weight: Tensor, logits: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(logits)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    weight, logits, draw, anneal, *ctx.rest = inputs
    ctx.save_for_backward(weight, logits, draw, anneal)


def _autograd_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    weight, logits, draw, anneal = ctx.saved_tensors
    of_logits = _masked_weight_backward(gradient.contiguous(), weight, logits, draw, anneal, *ctx.rest)
    return None, of_logits, *[None] * (2 + len(ctx.rest))


_masked_weight.register_autograd(_autograd_backward, setup_context=_setup_context)

# Values that change between parameters or steps must not trigger a recompilation.
_NOT_SPECIAL = ["salt0", "salt1", "first_row", "first_group", "groups"]


@triton.jit(do_not_specialize=_NOT_SPECIAL)
def _forward(
    weights, logits, products, draw, anneal, salt0, salt1, pairs, groups_here, first_row, first_group, groups,
    candidates: tl.constexpr, whole_rows: tl.constexpr, hard: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * block
    pair = tl.arange(0, block)
    here = pair < pairs - first
    scale, temperature = tl.load(anneal), tl.load(anneal + 1)
    key0, key1 = _key(draw, salt0, salt1)
    a, b = _two_of_logits(logits + first * 2 * candidates, pair, here, candidates)
    group = 2 * (first + pair)
    place_a = _place(group, groups_here, first_row, first_group, groups, whole_rows)
    place_b = _place(group + 1, groups_here, first_row, first_group, groups, whole_rows)
    ya = _choice(a, place_a, key0, key1, scale, temperature, candidates)
    yb = _choice(b, place_b, key0, key1, scale, temperature, candidates)
    ma, mb = _mask(ya, candidates, hard), _mask(yb, candidates, hard)
    wa, wb = _two_of_weights(weights + first * 8, pair, here)
    joined = _eight(wa[0] * ma[0], wa[1] * ma[1], wa[2] * ma[2], wa[3] * ma[3],
                    wb[0] * mb[0], wb[1] * mb[1], wb[2] * mb[2], wb[3] * mb[3])  # fmt: skip
    at = pair[:, None] * 8 + tl.arange(0, 8)[None, :]
    tl.store(products + first * 8 + at, joined.to(products.dtype.element_ty), mask=here[:, None])


@triton.jit(do_not_specialize=_NOT_SPECIAL)
def _backward(
    gradients, weights, logits, of_logits, draw, anneal, salt0, salt1, pairs, groups_here, first_row, first_group,
    groups, candidates: tl.constexpr, whole_rows: tl.constexpr, hard: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * block
    pair = tl.arange(0, block)
    here = pair < pairs - first
    scale, temperature, weight_reg = tl.load(anneal), tl.load(anneal + 1), tl.load(anneal + 2)
    key0, key1 = _key(draw, salt0, salt1)
    a, b = _two_of_logits(logits + first * 2 * candidates, pair, here, candidates)
    group = 2 * (first + pair)
    place_a = _place(group, groups_here, first_row, first_group, groups, whole_rows)
    place_b = _place(group + 1, groups_here, first_row, first_group, groups, whole_rows)
    ya = _choice(a, place_a, key0, key1, scale, temperature, candidates)
    yb = _choice(b, place_b, key0, key1, scale, temperature, candidates)
    wa, wb = _two_of_weights(weights + first * 8, pair, here)
    ga, gb = _two_of_weights(gradients + first * 8, pair, here)
    da = _by_logits(ya, wa, ga, scale, temperature, weight_reg, candidates, hard)
    db = _by_logits(yb, wb, gb, scale, temperature, weight_reg, candidates, hard)
    of_logits += first * 2 * candidates
    kind = of_logits.dtype.element_ty
    at = pair[:, None] * (2 * candidates) + tl.arange(0, 4)[None, :]
    there = here[:, None]
    tl.store(of_logits + at, _four(da[0], da[1], da[2], da[3]).to(kind), mask=there)
    if candidates == 6:
        tl.store(of_logits + at + 4, _four(da[4], da[5], db[0], db[1]).to(kind), mask=there)
        tl.store(of_logits + at + 8, _four(db[2], db[3], db[4], db[5]).to(kind), mask=there)
    else:
        tl.store(of_logits + at + 4, _four(db[0], db[1], db[2], db[3]).to(kind), mask=there)


@triton.jit
def _mixed(value):
    value = (value ^ (value >> 16)) * _FACTOR0
    value = (value ^ (value >> 13)) * _FACTOR1
    return value ^ (value >> 16)


@triton.jit
def _key(draw, salt0, salt1):
    return _mixed((tl.load(draw) + salt0).to(tl.uint32)), _mixed((tl.load(draw + 1) + salt1).to(tl.uint32))


@triton.jit
def _place(group, groups_here, first_row, first_group, groups, whole_rows: tl.constexpr):
    """A group's index in the whole parameter, in 32 bits that wrap around."""
    if whole_rows:
        return group.to(tl.uint32) + (first_row * groups).to(tl.uint32)
    row = group // groups_here
    return ((first_row + row) * groups + first_group + group - row * groups_here).to(tl.uint32)


@triton.jit
def _log2(x):
    """The GPU's approximate logarithm: one instruction instead of twenty."""
    if _INTERPRETED:
        return tl.log2(x)
    return libdevice.fast_log2f(x)


@triton.jit
def _gumbel(word):
    """Gumbel noise divided by ln 2, for exp2."""
    uniform = (word >> 9).to(tl.float32) * 1.1920928955078125e-07 + 5.9604644775390625e-08
    # The error of that logarithm is absolute: near 1, where the logarithm itself is small, a series replaces it.
    rest = 1.0 - uniform
    series = rest * (1.0 + rest * (0.5 + rest * 0.3333333333))
    return -_log2(tl.where(rest < 0.0078125, series, -0.6931471805599453 * _log2(uniform)))


@triton.jit
def _choice(logits, offset, key0, key1, scale, temperature, candidates: tl.constexpr):
    """The probabilities of a group's candidates; for 1:4 the last two are placeholders."""
    drawn = _mixed(offset * _GROUP_STEP + key0) + key1
    cold, scale = 1.0 / temperature, scale * 1.4426950408889634
    z0 = (logits[0] * scale + _gumbel(_mixed(drawn))) * cold
    z1 = (logits[1] * scale + _gumbel(_mixed(drawn + _STEP1))) * cold
    z2 = (logits[2] * scale + _gumbel(_mixed(drawn + _STEP2))) * cold
    z3 = (logits[3] * scale + _gumbel(_mixed(drawn + _STEP3))) * cold
    z4, z5 = z0, z0
    top = tl.maximum(tl.maximum(z0, z1), tl.maximum(z2, z3))
    if candidates == 6:
        z4 = (logits[4] * scale + _gumbel(_mixed(drawn + _STEP4))) * cold
        z5 = (logits[5] * scale + _gumbel(_mixed(drawn + _STEP5))) * cold
        top = tl.maximum(top, tl.maximum(z4, z5))
    z0, z1, z2, z3 = tl.exp2(z0 - top), tl.exp2(z1 - top), tl.exp2(z2 - top), tl.exp2(z3 - top)
    total = z0 + z1 + z2 + z3
    if candidates == 6:
        z4, z5 = tl.exp2(z4 - top), tl.exp2(z5 - top)
        total += z4 + z5
    part = 1.0 / total
    return z0 * part, z1 * part, z2 * part, z3 * part, z4 * part, z5 * part


@triton.jit
def _soft(y, candidates: tl.constexpr):
    if candidates == 6:
        return y[0] + y[1] + y[2], y[0] + y[3] + y[4], y[1] + y[3] + y[5], y[2] + y[4] + y[5]
    return y[0], y[1], y[2], y[3]


@triton.jit
def _mask(y, candidates: tl.constexpr, hard: tl.constexpr):
    """The mean of the candidates, or the most probable one (the first of ties)."""
    if not hard:
        return _soft(y, candidates)
    top, zero = tl.maximum(tl.maximum(y[0], y[1]), tl.maximum(y[2], y[3])), y[0] * 0.0
    if candidates == 6:
        top = tl.maximum(top, tl.maximum(y[4], y[5]))
    h0 = y[0] == top
    h1 = (y[1] == top) & ~h0
    h2 = (y[2] == top) & ~(h0 | h1)
    h3 = (y[3] == top) & ~(h0 | h1 | h2)
    h4, h5 = h3, h3
    if candidates == 6:
        h4 = (y[4] == top) & ~(h0 | h1 | h2 | h3)
        h5 = ~(h0 | h1 | h2 | h3 | h4)
    one = zero + 1.0
    chosen = (tl.where(h0, one, zero), tl.where(h1, one, zero), tl.where(h2, one, zero), tl.where(h3, one, zero),
              tl.where(h4, one, zero), tl.where(h5, one, zero))  # fmt: skip
    return _soft(chosen, candidates)


@triton.jit
def _by_logits(y, w, g, scale, temperature, weight_reg, candidates: tl.constexpr, hard: tl.constexpr):
    s = _soft(y, candidates)
    m = _mask(y, candidates, hard)
    b0 = g[0] * w[0] - 2 * weight_reg * w[0] * w[0] * m[0]
    b1 = g[1] * w[1] - 2 * weight_reg * w[1] * w[1] * m[1]
    b2 = g[2] * w[2] - 2 * weight_reg * w[2] * w[2] * m[2]
    b3 = g[3] * w[3] - 2 * weight_reg * w[3] * w[3] * m[3]
    mean = s[0] * b0 + s[1] * b1 + s[2] * b2 + s[3] * b3
    factor = scale / temperature
    f0, f1, f2, f3 = factor * y[0], factor * y[1], factor * y[2], factor * y[3]
    if candidates == 6:
        f4, f5 = factor * y[4], factor * y[5]
        return (
            f0 * (b0 + b1 - mean), f1 * (b0 + b2 - mean), f2 * (b0 + b3 - mean),
            f3 * (b1 + b2 - mean), f4 * (b1 + b3 - mean), f5 * (b2 + b3 - mean),
        )  # fmt: skip
    return f0 * (b0 - mean), f1 * (b1 - mean), f2 * (b2 - mean), f3 * (b3 - mean), f0, f0


@triton.jit
def _parted(four):
    even, odd = tl.split(tl.reshape(four, (four.shape[0], 2, 2)))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return x0, x1, x2, x3


@triton.jit
def _four(x0, x1, x2, x3):
    return tl.reshape(tl.join(tl.join(x0, x2), tl.join(x1, x3)), (x0.shape[0], 4))


@triton.jit
def _eight(x0, x1, x2, x3, x4, x5, x6, x7):
    even, odd = _four(x0, x2, x4, x6), _four(x1, x3, x5, x7)
    return tl.reshape(tl.join(even, odd), (x0.shape[0], 8))


@triton.jit
def _two_of_weights(weights, pair, here):
    at = pair[:, None] * 8 + tl.arange(0, 8)[None, :]
    eight = tl.load(weights + at, mask=here[:, None], other=0.0).to(tl.float32)
    even, odd = tl.split(tl.reshape(eight, (eight.shape[0], 4, 2)))
    x0, x2, x4, x6 = _parted(even)
    x1, x3, x5, x7 = _parted(odd)
    return (x0, x1, x2, x3), (x4, x5, x6, x7)


@triton.jit
def _two_of_logits(logits, pair, here, candidates: tl.constexpr):
    at = pair[:, None] * (2 * candidates) + tl.arange(0, 4)[None, :]
    there = here[:, None]
    p = _parted(tl.load(logits + at, mask=there, other=0.0).to(tl.float32))
    q = _parted(tl.load(logits + at + 4, mask=there, other=0.0).to(tl.float32))
    if candidates == 6:
        r = _parted(tl.load(logits + at + 8, mask=there, other=0.0).to(tl.float32))
        return (p[0], p[1], p[2], p[3], q[0], q[1]), (q[2], q[3], r[0], r[1], r[2], r[3])
    return (p[0], p[1], p[2], p[3], p[0], p[0]), (q[0], q[1], q[2], q[3], q[0], q[0])
