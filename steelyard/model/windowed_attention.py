"""Attention with sliding windows or soft caps on a GPU; `attention.attend` on a CPU is the specification.

Windows alone run in flash attention, whose kernels skip the keys outside. Soft caps need `flex_attention`, which is
compiled, in bf16 or fp16. In fp32 there is no such kernel: scores are computed densely.

Tensor suffixes: B batch, L length, H heads, K key-value heads, E head width.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from steelyard.model.attention import CuSeqlens, Scoring, attend_capped, causal_window_mask, dense_mask
from steelyard.model.attention import attend as attend_plainly

BLOCK = 128  # tokens of a block of the mask


def attend(
    query_BHLE: Tensor, key_BKLE: Tensor, value_BKLE: Tensor, mask: Tensor | CuSeqlens | None, scoring: Scoring
) -> Tensor:
    """Attention with a window, a soft cap or both."""
    length, seen = query_BHLE.shape[2], key_BKLE.shape[2]
    if length == 1 and mask is None and scoring.window is not None:  # Decoding: only the last keys matter.
        key_BKLE, value_BKLE = key_BKLE[:, :, -scoring.window :], value_BKLE[:, :, -scoring.window :]
        scoring, seen = scoring._replace(window=None), key_BKLE.shape[2]
        if scoring.softcap is None:
            return attend_plainly(query_BHLE, key_BKLE, value_BKLE, None, scoring)
    is_dense = query_BHLE.dtype == torch.float32 or isinstance(mask, Tensor)
    if is_dense or not has_window_kernels(query_BHLE.shape[-1]):
        if isinstance(mask, CuSeqlens):
            mask = dense_mask(mask, len(query_BHLE), length)
        near = causal_window_mask(length, seen, scoring.window or seen, query_BHLE.device)
        return attend_capped(query_BHLE, key_BKLE, value_BKLE, near if mask is None else mask & near, scoring)
    assert not isinstance(mask, Tensor)
    if scoring.softcap is None:
        return _flash(query_BHLE, key_BKLE, value_BKLE, mask, scoring)
    return _flex(query_BHLE, key_BKLE, value_BKLE, mask, scoring)


def _flash(q_BHLE: Tensor, k_BKLE: Tensor, v_BKLE: Tensor, documents: CuSeqlens | None, scoring: Scoring) -> Tensor:
    """Variable-length flash attention; a row without documents is one. Fewer queries than keys are the last tokens."""
    (rows, _, length, _), seen = q_BHLE.shape, k_BKLE.shape[2]
    of_queries, of_keys = (documents or _one_document(rows, each, q_BHLE.device) for each in (length, seen))
    query, key, value = (x.transpose(1, 2).flatten(0, 1) for x in (q_BHLE, k_BKLE, v_BKLE))
    assert scoring.window is not None
    attn_out_THE: Tensor = torch.ops.aten._flash_attention_forward(
        query, key, value, of_queries.offsets, of_keys.offsets, of_queries.max_seqlen, of_keys.max_seqlen, 0.0, True,
        False, scale=scoring.scale, window_size_left=scoring.window - 1, window_size_right=0,
    )[0]  # fmt: skip
    attn_out_BLHE: Tensor = attn_out_THE.unflatten(0, (rows, length))
    return attn_out_BLHE.transpose(1, 2)


def _one_document(rows: int, length: int, device: torch.device) -> CuSeqlens:
    return CuSeqlens(torch.arange(0, (rows + 1) * length, length, dtype=torch.int32, device=device), length)


def _flex(q_BHLE: Tensor, k_BKLE: Tensor, v_BKLE: Tensor, documents: CuSeqlens | None, scoring: Scoring) -> Tensor:
    (rows, _, length, _), seen = q_BHLE.shape, k_BKLE.shape[2]
    document_BL, before = None, seen - length
    if documents is not None:
        tokens = torch.arange(rows * length, dtype=torch.int32, device=q_BHLE.device)
        document_BL = torch.searchsorted(documents.offsets, tokens, right=True).view(rows, length)
    window = scoring.window or seen
    assert scoring.softcap is not None
    # A tensor, since flex_attention refuses a number that differs between models in one process.
    softcap = torch.full((), scoring.softcap, device=q_BHLE.device)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        near = (k <= q + before) & (k > q + before - window)
        return near if document_BL is None else near & (document_BL[b, q] == document_BL[b, k])

    blocks = _blocks(length, seen, window, q_BHLE.device, mask_mod)
    attend_: Any = flex_attention if torch.compiler.is_compiling() else _compiled()
    grouped = q_BHLE.shape[1] != k_BKLE.shape[1]
    attn_out_BHLE: Tensor = attend_(q_BHLE, k_BKLE, v_BKLE, score_mod, blocks, scale=scoring.scale, enable_gqa=grouped)
    return attn_out_BHLE


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def has_window_kernels(width: int) -> bool:
    """Whether flash attention supports this GPU and width of a head."""
    return width % 8 == 0 and width <= 256 and torch.cuda.get_device_capability() >= (8, 0)


@functools.cache
def _compiled() -> Callable[..., Any]:
    return torch.compile(flex_attention)


def _blocks(length: int, seen: int, window: int, device: torch.device, mask_mod: Callable[..., Tensor]) -> BlockMask:
    """The blocks of keys that each block of queries attends to, from the first of its window to its own."""
    count, before = -(-seen // BLOCK), seen - length
    begin = before + BLOCK * torch.arange(-(-length // BLOCK), dtype=torch.int32, device=device)
    first = ((begin - window + 1) // BLOCK).clamp(min=0)
    last = ((begin + BLOCK - 1) // BLOCK).clamp(max=count - 1)
    # The blocks in use come first: first, first + 1, ...; what follows is never read.
    number = torch.arange(count, dtype=torch.int32, device=device)
    indices = (first[:, None] + number[None, :]).clamp(max=count - 1)
    return BlockMask.from_kv_blocks(
        (last - first + 1)[None, None], indices[None, None].to(torch.int32), BLOCK_SIZE=BLOCK, mask_mod=mask_mod,
        seq_lengths=(length, seen),
    )  # fmt: skip
