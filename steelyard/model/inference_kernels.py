"""Triton kernels of inference: norms, rotary positions, gated activations, and attention of one query.

Training compiles its layers, which fuses these operations. Inference starts without compiling, and each of them would
be 3 to 14 kernels of about two microseconds: for one token, a third of the time of a model with 8 billion parameters.
The plain versions in `modules.py`, `rope.py`, `mlp.py` and `attention.py` are the specification.

Each kernel starts while the one before it is finishing (`dependent_launch.py`).

This module is imported only on machines with a GPU, since others may have no Triton.

Tensor suffixes: B batch, L length, H heads, K key-value heads, E head width.
"""

# Kernels have no types that mypy could check.
# mypy: disallow-untyped-defs=false, disallow-untyped-decorators=false, disallow-incomplete-defs=false
# mypy: disallow-untyped-calls=false

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from steelyard.model import dependent_launch
from steelyard.model.dependent_launch import let_next_start, wait_for_previous

HEADS = 8  # of one program that rotates
COLUMNS = 1024  # of one program that activates
KEYS = 32  # of one step of attention
PROGRAMS = 6  # of attention, per multiprocessor: so many fit into its shared memory
MOST_PARTS = 64
AT_ONCE = 16  # parts of 512 sums that are combined at once
COUNTERS = 1 << 16


def rms_norm(x: Tensor, scale: Tensor, eps: float, is_offset: bool) -> Tensor:
    """`modules.RmsNorm`."""
    return _normalized(x.contiguous(), None, scale, eps, is_offset)[1]


def add_rms_norm(x: Tensor, branch: Tensor, scale: Tensor, eps: float, is_offset: bool) -> tuple[Tensor, Tensor]:
    """The sum of two tensors, and its norm."""
    return _normalized(x.contiguous(), branch.contiguous(), scale, eps, is_offset)


def _normalized(x: Tensor, branch: Tensor | None, scale: Tensor, eps: float, is_offset: bool) -> tuple[Tensor, Tensor]:
    width = x.shape[-1]
    y, total = torch.empty_like(x), x if branch is None else torch.empty_like(x)
    block = triton.next_power_of_2(width)
    _rms_norm[(x.numel() // width,)](
        x, x if branch is None else branch, total, scale, y, width, eps, branch is not None, is_offset, block,
        num_warps=min(max(block // 512, 1), 16), **dependent_launch.options(x.device),
    )  # fmt: skip
    return total, y


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """The activation of `gate` times `up`. Both may be columns of one tensor."""
    y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    rows, width = gate.numel() // gate.shape[-1], gate.shape[-1]
    _gated[(rows, triton.cdiv(width, COLUMNS))](
        gate, up, y, gate.stride(-2), up.stride(-2), width, activation == "silu", COLUMNS,
        **dependent_launch.options(gate.device),
    )  # fmt: skip
    return y


def rotated(x_BHLE: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """`rope.apply_rope`."""
    batch, heads, length, width = x_BHLE.shape
    y_BHLE = torch.empty(batch, length, heads, width, dtype=x_BHLE.dtype, device=x_BHLE.device).transpose(1, 2)
    cosine, sine = cosine.contiguous(), sine.contiguous()
    _rotate[(batch * length, triton.cdiv(heads, HEADS))](
        x_BHLE, cosine, sine, y_BHLE, *x_BHLE.stride()[:3], *y_BHLE.stride()[:3], _row_stride(cosine), length, heads,
        width, cosine.shape[-1], HEADS, triton.next_power_of_2(width), **dependent_launch.options(x_BHLE.device),
    )  # fmt: skip
    return y_BHLE


def rotated_into_cache(
    query_BH1E: Tensor, key_BK1E: Tensor, value_BK1E: Tensor, rotation: tuple[Tensor, Tensor],
    key_buffer_BKLE: Tensor, value_buffer_BKLE: Tensor, position_1: Tensor,
) -> Tensor:  # fmt: skip
    """Rotate the query and the key of one token, and write key and value to their position. Returns the query."""
    batch, heads, _, width = query_BH1E.shape
    kv_heads = key_BK1E.shape[1]
    cosine, sine = (table.contiguous() for table in rotation)
    turned = torch.empty(batch, 1, heads, width, dtype=query_BH1E.dtype, device=query_BH1E.device).transpose(1, 2)
    assert key_buffer_BKLE.stride() == value_buffer_BKLE.stride()
    assert key_buffer_BKLE.stride(-1) == 1
    _rotate_into_cache[(batch, triton.cdiv(heads, HEADS) + 2 * triton.cdiv(kv_heads, HEADS))](
        query_BH1E, key_BK1E, value_BK1E, cosine, sine, turned, key_buffer_BKLE, value_buffer_BKLE, position_1,
        *query_BH1E.stride()[:2], *key_BK1E.stride()[:2], *value_BK1E.stride()[:2], *turned.stride()[:2],
        *key_buffer_BKLE.stride()[:3], _row_stride(cosine), heads, kv_heads, width, cosine.shape[-1], HEADS,
        triton.next_power_of_2(width), **dependent_launch.options(query_BH1E.device),
    )  # fmt: skip
    return turned


def attend_one(
    query_BH1E: Tensor, key_BKLE: Tensor, value_BKLE: Tensor, position_1: Tensor, window: int | None,
    softcap: float | None, scale: float | None,
) -> Tensor:  # fmt: skip
    """`attention.attend_one`. The keys are split over programs; the last to finish combines them in a fixed order."""
    batch, heads, _, width = query_BH1E.shape
    kv_heads, span = key_BKLE.shape[1:3]
    assert key_BKLE.stride() == value_BKLE.stride()
    assert batch * kv_heads <= COUNTERS
    parts = min(triton.cdiv(span, KEYS), triton.cdiv(PROGRAMS * _processors(query_BH1E.device), batch * kv_heads))
    parts = min(parts, MOST_PARTS)
    steps = triton.cdiv(span, KEYS * parts)
    block, rows = max(triton.next_power_of_2(width), 16), max(triton.next_power_of_2(heads // kv_heads), 16)
    query, device = query_BH1E.contiguous(), query_BH1E.device
    stored = triton.next_power_of_2(heads // kv_heads)
    sums = torch.empty(batch * kv_heads, parts, stored, block, dtype=torch.float32, device=device)
    limits = torch.empty(batch * kv_heads, parts, 2, stored, dtype=torch.float32, device=device)
    out_B1HE = torch.empty(batch, 1, heads, width, dtype=query.dtype, device=device)
    _attend_one[(batch * kv_heads, parts)](
        query, key_BKLE, value_BKLE, position_1, out_B1HE, sums, limits, _counters(device), *key_BKLE.stride()[:3],
        width**-0.5 if scale is None else scale, kv_heads, width, steps, parts, window or 0, softcap or 0.0,
        heads // kv_heads, stored, rows, block, KEYS, max(AT_ONCE * 512 // (stored * block), 1), num_warps=4,
        **dependent_launch.options(device),
    )  # fmt: skip
    return out_B1HE.transpose(1, 2)


def _row_stride(table: Tensor) -> int:
    """Elements from one row of the batch to the next; 0 if all rows share their positions."""
    return table.stride(0) if table.shape[0] > 1 else 0


@cache
def _processors(device: torch.device) -> int:
    """Multiprocessors of a GPU."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 1


@cache
def _counters(device: torch.device) -> Tensor:
    """Zeros; every kernel leaves them as zeros."""
    return torch.zeros(COUNTERS, dtype=torch.int32, device=device)


@triton.jit
def _rms_norm(
    x, branch, total, scale, y, width, eps, adds: tl.constexpr, is_offset: tl.constexpr, block: tl.constexpr,
    early: tl.constexpr,
):  # fmt: skip
    if early:
        let_next_start()
        wait_for_previous()
    first = tl.program_id(0).to(tl.int64) * width
    column = tl.arange(0, block)
    here = column < width
    values = tl.load(x + first + column, here, other=0.0).to(tl.float32)
    if adds:
        values += tl.load(branch + first + column, here, other=0.0).to(tl.float32)
        rounded = values.to(y.dtype.element_ty)
        tl.store(total + first + column, rounded, here)
        values = rounded.to(tl.float32)
    factor = tl.load(scale + column, here, other=0.0).to(tl.float32)
    if is_offset:
        factor += 1.0
    values *= tl.rsqrt(tl.sum(values * values) / width + eps)
    tl.store(y + first + column, (values * factor).to(y.dtype.element_ty), here)


@triton.jit
def _gated(
    gate, up, y, gate_stride, up_stride, width, is_silu: tl.constexpr, columns: tl.constexpr, early: tl.constexpr
):
    if early:
        let_next_start()
        wait_for_previous()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * columns + tl.arange(0, columns)
    here = column < width
    x = tl.load(gate + row * gate_stride + column, here, other=0.0).to(tl.float32)
    # GELU's tanh(z) is 2 sigmoid(2z) - 1.
    steepness = 1.0 if is_silu else 2 * 0.7978845608028654 * (1.0 + 0.044715 * x * x)
    active = (x * tl.sigmoid(steepness * x)).to(y.dtype.element_ty).to(tl.float32)
    value = active * tl.load(up + row * up_stride + column, here, other=0.0).to(tl.float32)
    tl.store(y + row * width + column, value.to(y.dtype.element_ty), here)


@triton.jit
def _turned(x, stride, first_head, heads, cosine, sine, width, turning, at_once: tl.constexpr, block: tl.constexpr):
    """Heads of one token, the first `turning` dimensions rotated. Returns values, and where they are real."""
    head, column = first_head + tl.arange(0, at_once), tl.arange(0, block)
    here = (head < heads)[:, None] & (column < width)[None, :]
    x += head.to(tl.int64)[:, None] * stride
    values = tl.load(x + column[None, :], here, other=0.0)
    half = turning // 2
    turns = here & (column < turning)[None, :]
    partner = tl.where(column < half, column + half, column - half)
    others = tl.load(x + partner[None, :], turns, other=0.0).to(tl.float32)
    others = tl.where((column < half)[None, :], -others, others)
    cosines = tl.load(cosine + column, column < turning, other=1.0)
    sines = tl.load(sine + column, column < turning, other=0.0)
    turned = values.to(tl.float32) * cosines[None, :] + others * sines[None, :]
    return tl.where(turns, turned.to(values.dtype), values), here


@triton.jit
def _put(y, stride, first_head, values, here, at_once: tl.constexpr, block: tl.constexpr):
    head, column = first_head + tl.arange(0, at_once), tl.arange(0, block)
    tl.store(y + head.to(tl.int64)[:, None] * stride + column[None, :], values, here)


@triton.jit
def _rotate(
    x, cosine, sine, y, x_row, x_head, x_token, y_row, y_head, y_token, table_row, length, heads, width, turning,
    at_once: tl.constexpr, block: tl.constexpr, early: tl.constexpr,
):  # fmt: skip
    if early:
        let_next_start()
        wait_for_previous()
    row, token = (tl.program_id(0) // length).to(tl.int64), (tl.program_id(0) % length).to(tl.int64)
    first = tl.program_id(1) * at_once
    table = row * table_row + token * turning
    values, here = _turned(
        x + row * x_row + token * x_token, x_head, first, heads, cosine + table, sine + table, width, turning, at_once,
        block,
    )  # fmt: skip
    _put(y + row * y_row + token * y_token, y_head, first, values, here, at_once, block)


@triton.jit
def _rotate_into_cache(
    query, key, value, cosine, sine, turned, key_buffer, value_buffer, position, query_row, query_head, key_row,
    key_head, value_row, value_head, turned_row, turned_head, buffer_row, buffer_head, buffer_token, table_row, heads,
    kv_heads, width, turning, at_once: tl.constexpr, block: tl.constexpr, early: tl.constexpr,
):  # fmt: skip
    if early:
        let_next_start()
        wait_for_previous()
    row, number = tl.program_id(0).to(tl.int64), tl.program_id(1)
    of_queries, of_keys = tl.cdiv(heads, at_once), tl.cdiv(kv_heads, at_once)
    cosine += row * table_row
    sine += row * table_row
    cached = row * buffer_row + tl.load(position) * buffer_token
    if number < of_queries:
        first = number * at_once
        values, here = _turned(
            query + row * query_row, query_head, first, heads, cosine, sine, width, turning, at_once, block
        )
        _put(turned + row * turned_row, turned_head, first, values, here, at_once, block)
    elif number < of_queries + of_keys:
        first = (number - of_queries) * at_once
        values, here = _turned(
            key + row * key_row, key_head, first, kv_heads, cosine, sine, width, turning, at_once, block
        )
        _put(key_buffer + cached, buffer_head, first, values, here, at_once, block)
    else:
        first = (number - of_queries - of_keys) * at_once
        values, here = _turned(
            value + row * value_row, value_head, first, kv_heads, cosine, sine, width, 0, at_once, block
        )
        _put(value_buffer + cached, buffer_head, first, values, here, at_once, block)


@triton.jit
def _attend_one(
    query, key, value, position, out, sums, limits, done, row_stride, head_stride, token_stride, scale, kv_heads, width,
    steps, parts, window: tl.constexpr, softcap: tl.constexpr, group: tl.constexpr, stored: tl.constexpr,
    rows: tl.constexpr, block: tl.constexpr, keys: tl.constexpr, at_once: tl.constexpr, early: tl.constexpr,
):  # fmt: skip
    if early:
        let_next_start()
        wait_for_previous()
    pair, part = tl.program_id(0), tl.program_id(1)  # A pair is a row of the batch and a key-value head.
    last = tl.load(position)
    part_keys = steps * keys
    active = (last // part_keys + 1).to(tl.int32)  # Later parts have no keys up to the position.
    if part < active:
        head, column = tl.arange(0, rows), tl.arange(0, block)
        is_head, is_column = head < group, column < width
        of_queries = pair.to(tl.int64) * group * width + head[:, None] * width + column[None, :]
        of_pair = (pair // kv_heads).to(tl.int64) * row_stride + (pair % kv_heads).to(tl.int64) * head_stride
        queries = tl.load(query + of_queries, is_head[:, None] & is_column[None, :], other=0.0)
        largest = tl.full((rows,), -1e30, tl.float32)
        weight = tl.zeros((rows,), tl.float32)
        total = tl.zeros((rows, block), tl.float32)
        for step in range(steps):
            token = part * part_keys + step * keys + tl.arange(0, keys)
            seen = token <= last
            if window > 0:
                seen = seen & (token > last - window)
            at = of_pair + token.to(tl.int64)[:, None] * token_stride + column[None, :]
            real = seen[:, None] & is_column[None, :]
            keys_here = tl.load(key + at, real, other=0.0)
            values = tl.load(value + at, real, other=0.0)
            scores = tl.dot(queries, tl.trans(keys_here), input_precision="ieee") * scale
            if softcap > 0:  # softcap * tanh(scores / softcap)
                scores = softcap * (2 * tl.sigmoid(2 * scores / softcap) - 1)
            scores = tl.where(seen[None, :], scores, -1e30)
            higher = tl.maximum(largest, tl.max(scores, 1))
            shares = tl.where(seen[None, :], tl.exp(scores - higher[:, None]), 0.0)
            shrink = tl.exp(largest - higher)
            weight = weight * shrink + tl.sum(shares, 1)
            total = total * shrink[:, None] + tl.dot(shares.to(values.dtype), values, input_precision="ieee")
            largest = higher
        first = pair.to(tl.int64) * parts
        is_stored = head < stored
        place_of = head[:, None] * block + column[None, :]
        tl.store(sums + (first + part) * stored * block + place_of, total, is_stored[:, None], cache_modifier=".cg")
        tl.store(limits + (first + part) * 2 * stored + head, largest, is_stored, cache_modifier=".cg")
        tl.store(limits + (first + part) * 2 * stored + stored + head, weight, is_stored, cache_modifier=".cg")
        tl.debug_barrier()  # One thread increments the counter, only after all others have written.
        if tl.atomic_add(done + pair, 1, sem="acq_rel") == active - 1:
            _combine(sums, limits, first, active, out + pair.to(tl.int64) * group * width, width, group, stored, block,
                     at_once)  # fmt: skip
            tl.store(done + pair, 0)


@triton.jit
def _combine(
    sums, limits, first, active, out, width, group: tl.constexpr, stored: tl.constexpr, block: tl.constexpr,
    at_once: tl.constexpr,
):  # fmt: skip
    """The mean over all parts, `at_once` at a time: their loads do not wait for each other."""
    head, column, number = tl.arange(0, stored), tl.arange(0, block), tl.arange(0, at_once)
    largest = tl.full((stored,), -1e30, tl.float32)
    weight = tl.zeros((stored,), tl.float32)
    total = tl.zeros((stored, block), tl.float32)
    for begin in range(0, active, at_once):
        is_part = begin + number < active
        part = first + begin + number
        of_limits = part[:, None] * 2 * stored + head[None, :]
        peaks = tl.load(limits + of_limits, is_part[:, None], other=-1e30, cache_modifier=".cg")
        weights = tl.load(limits + of_limits + stored, is_part[:, None], other=0.0, cache_modifier=".cg")
        of_sums = part[:, None, None] * (stored * block) + head[None, :, None] * block + column[None, None, :]
        part_sums = tl.load(sums + of_sums, is_part[:, None, None], other=0.0, cache_modifier=".cg")
        higher = tl.maximum(largest, tl.max(peaks, 0))
        shrink, grow = tl.exp(largest - higher), tl.exp(peaks - higher[None, :])
        weight = weight * shrink + tl.sum(weights * grow, 0)
        total = total * shrink[:, None] + tl.sum(part_sums * grow[:, :, None], 0)
        largest = higher
    here = (head < group)[:, None] & (column < width)[None, :]
    mean = total / weight[:, None]
    tl.store(out + head[:, None] * width + column[None, :], mean.to(out.dtype.element_ty), here)
