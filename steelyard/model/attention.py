"""Causal attention, also within the documents of a packed row.

A mask is dense (bool, True where a query may attend to a key) or, for variable-length attention, the cumulative lengths
of the documents (`CuSeqlens`), or, for a single query, its position among the keys (`KeysUpTo`). `dense_mask` converts
the second form to the first and is its specification.

Tensor suffixes: B batch, L length, H heads, K key-value heads, E head width, N documents of a row, T all tokens.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Container
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.varlen import varlen_attn

from steelyard.model.dropout import FACTORS, drop, mixed
from steelyard.model.modules import is_inference


class CuSeqlens(NamedTuple):
    """The documents of all rows, with the rows concatenated."""

    offsets: Tensor
    """The start of each document, then the end of the last one; int32."""
    max_seqlen: int
    """A power of two that no document exceeds: kernels launch work for this many tokens of every document."""


class KeysUpTo(NamedTuple):
    """The position of the only query of each row. Keys after it are not read."""

    position_1: Tensor


class Scoring(NamedTuple):
    """How attention scores are computed, other than by a scaled causal product."""

    window: int | None = None
    """A token attends to itself and the window - 1 tokens before it."""
    softcap: float | None = None
    scale: float | None = None
    """By default 1 / sqrt(head width)."""


PLAIN = Scoring()


def attend(
    query_BHLE: Tensor,
    key_BKLE: Tensor,
    value_BKLE: Tensor,
    mask: Tensor | CuSeqlens | KeysUpTo | None,
    scoring: Scoring = PLAIN,
) -> Tensor:
    """Scaled dot-product attention, causal if `mask` is None.

    If there are more keys than queries, the queries are the last tokens.
    """
    if isinstance(mask, KeysUpTo):
        return attend_one(query_BHLE, key_BKLE, value_BKLE, mask, scoring)
    length, seen = query_BHLE.shape[2], key_BKLE.shape[2]
    if scoring.window is not None and scoring.window >= seen:
        scoring = scoring._replace(window=None)
    if query_BHLE.is_cuda and (scoring.window is not None or scoring.softcap is not None):
        from steelyard.model import windowed_attention

        return windowed_attention.attend(query_BHLE, key_BKLE, value_BKLE, mask, scoring)
    if isinstance(mask, CuSeqlens):
        return varlen_attention(query_BHLE, key_BKLE, value_BKLE, mask, scoring)
    if scoring.window is not None:
        near = causal_window_mask(length, seen, scoring.window, query_BHLE.device)
        mask = near if mask is None else mask & near
    if scoring.softcap is not None:
        return attend_capped(query_BHLE, key_BKLE, value_BKLE, mask, scoring)
    grouped = query_BHLE.shape[1] != key_BKLE.shape[1]
    if mask is None and 1 < length < seen:
        mask = causal_lower_right(length, seen)
    is_causal = mask is None and length == seen
    return F.scaled_dot_product_attention(
        query_BHLE, key_BKLE, value_BKLE, mask, is_causal=is_causal, scale=scoring.scale, enable_gqa=grouped
    )


def attend_one(
    query_BH1E: Tensor, key_BKLE: Tensor, value_BKLE: Tensor, upto: KeysUpTo, scoring: Scoring = PLAIN
) -> Tensor:
    """Attention of one query to the keys up to its position.

    The query heads that share a key head are computed as so many queries, so that keys are read once and not repeated.
    """
    if is_inference(query_BH1E):
        from steelyard.model import inference_kernels

        return inference_kernels.attend_one(query_BH1E, key_BKLE, value_BKLE, upto.position_1, *scoring)
    positions = torch.arange(key_BKLE.shape[2], device=key_BKLE.device)
    mask = positions <= upto.position_1
    if scoring.window is not None:
        mask = mask & (positions > upto.position_1 - scoring.window)
    query_BKGE = query_BH1E.squeeze(2).unflatten(1, (key_BKLE.shape[1], -1))
    mask_GL = mask.expand(query_BKGE.shape[2], -1)
    if scoring.softcap is None:
        out_BKGE = F.scaled_dot_product_attention(query_BKGE, key_BKLE, value_BKLE, mask_GL, scale=scoring.scale)
    else:
        out_BKGE = attend_capped(query_BKGE.float(), key_BKLE.float(), value_BKLE, mask_GL, scoring)
    return out_BKGE.flatten(1, 2).unsqueeze(2)


def causal_window_mask(length: int, seen: int, window: int, device: torch.device) -> Tensor:
    """True where one of the last `length` tokens attends to one of `seen` within a causal window."""
    keys = torch.arange(seen, device=device)
    queries = keys[seen - length :, None]
    return (keys <= queries) & (keys > queries - window)


def attend_capped(
    query_BHLE: Tensor, key_BKLE: Tensor, value_BKLE: Tensor, mask: Tensor | None, scoring: Scoring
) -> Tensor:
    """Attention with soft caps, in plain torch: the specification of the GPU's."""
    scores = _scores(query_BHLE, key_BKLE, mask, scoring)
    groups = query_BHLE.shape[1] // key_BKLE.shape[1]
    return scores.softmax(dim=-1).to(value_BKLE.dtype) @ value_BKLE.repeat_interleave(groups, dim=1)


def _scores(query_BHLE: Tensor, key_BKLE: Tensor, mask: Tensor | None, scoring: Scoring) -> Tensor:
    """Scores in fp32, -inf where a token does not attend; causal if `mask` is None."""
    key_BHLE = key_BKLE.repeat_interleave(query_BHLE.shape[1] // key_BKLE.shape[1], dim=1)
    scale = query_BHLE.shape[-1] ** -0.5 if scoring.scale is None else scoring.scale
    scores = (query_BHLE @ key_BHLE.transpose(-1, -2)).float() * scale
    if scoring.softcap is not None:
        scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
    if mask is None:
        mask = causal_window_mask(query_BHLE.shape[2], key_BKLE.shape[2], key_BKLE.shape[2], query_BHLE.device)
    return scores.masked_fill(~mask, float("-inf"))


def varlen_attention(
    query_BHLE: Tensor, key_BKLE: Tensor, value_BKLE: Tensor, cu_seqlens: CuSeqlens, scoring: Scoring = PLAIN
) -> Tensor:
    """Causal attention within documents. On a GPU it is flash attention, with one sequence per document."""
    rows, _, length, _ = query_BHLE.shape
    if not query_BHLE.is_cuda:
        return attend(query_BHLE, key_BKLE, value_BKLE, dense_mask(cu_seqlens, rows, length), scoring)
    query, key, value = (x.transpose(1, 2).flatten(0, 1) for x in (query_BHLE, key_BKLE, value_BKLE))
    offsets, max_seqlen = cu_seqlens
    packed = query, key, value, offsets, offsets, max_seqlen, max_seqlen
    scale: dict[str, Any] = {} if scoring.scale is None else {"scale": scoring.scale}
    if query_BHLE.shape[1] == key_BKLE.shape[1] or "enable_gqa" in VARLEN_OPTIONS:
        options = VARLEN_OPTIONS | scale
        attn_out_THE: Tensor = varlen_attn(*packed, **options)  # type: ignore[assignment]
    else:  # In this torch `varlen_attn` does not support grouped heads, but the operator below it does.
        attn_out_THE = torch.ops.aten._flash_attention_forward(*packed, 0.0, True, False, **scale)[0]
    attn_out_BLHE: Tensor = attn_out_THE.unflatten(0, (rows, length))
    return attn_out_BLHE.transpose(1, 2)


def varlen_options(parameters: Container[str]) -> dict[str, Any]:
    """The keyword arguments for causal attention with grouped heads that this version of `varlen_attn` accepts.

    torch 2.10 has `is_causal`. Since 2.11 causal attention is a window, and since 2.12 grouped heads have a keyword.
    """
    options: dict[str, Any] = {"is_causal": True} if "is_causal" in parameters else {"window_size": (-1, 0)}
    return options | ({"enable_gqa": True} if "enable_gqa" in parameters else {})


VARLEN_OPTIONS = varlen_options(inspect.signature(varlen_attn).parameters)


def cu_seqlens_of(document_starts_BN: Tensor, length: int, device: torch.device) -> CuSeqlens:
    """Cumulative lengths from the start of each document in its row. A start at the end of the row is padding.

    On the host the padding is removed and the longest document is computed. On a GPU, where FSDP moves all model
    inputs, that would need a synchronization: padding stays as empty documents, and `max_seqlen` is the row length.
    """
    row_starts_B1 = (
        length * torch.arange(len(document_starts_BN), dtype=torch.int32, device=document_starts_BN.device)[:, None]
    )
    begins, max_seqlen = document_starts_BN + row_starts_B1, length
    begins = begins.flatten() if document_starts_BN.is_cuda else begins[document_starts_BN < length]
    offsets = F.pad(begins, (0, 1), value=len(document_starts_BN) * length)
    if not document_starts_BN.is_cuda:
        max_seqlen = int(offsets.diff().max())
    if device.type == "cuda":
        offsets = offsets if offsets.is_cuda else offsets.pin_memory().to(device, non_blocking=True)
        # Layers are then compiled once for any number of documents; a second row length still compiles them again.
        torch._dynamo.maybe_mark_dynamic(offsets, 0)
    return CuSeqlens(offsets, 1 << (max_seqlen - 1).bit_length())


def dense_mask(cu_seqlens: CuSeqlens, rows: int, length: int) -> Tensor:
    """The equivalent dense mask: True where a token may attend. Shape (B, 1, L, L)."""
    tokens = torch.arange(rows * length, dtype=torch.int32, device=cu_seqlens.offsets.device)
    return within_documents(torch.searchsorted(cu_seqlens.offsets, tokens, right=True).view(rows, length))


@functools.cache
def has_varlen_attention(device: torch.device, dtype: torch.dtype, width: int) -> bool:
    """Whether variable-length attention works on this device: it must run and give the result of the dense mask."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16) or width % 8 or width > 256:
        return False
    generator = torch.Generator(device).manual_seed(0)
    query, key, value = (
        torch.randn(2, heads, 128, width, dtype=dtype, device=device, generator=generator).requires_grad_()
        for heads in (4, 2, 2)
    )
    cu_seqlens = cu_seqlens_of(torch.tensor([[0, 7, 100, 128], [0, 64, 128, 128]], dtype=torch.int32), 128, device)
    results = []
    for mask in (dense_mask(cu_seqlens, 2, 128), cu_seqlens):
        try:
            attn_out = attend(query, key, value, mask)
            results.append([attn_out, *torch.autograd.grad(attn_out.float().square().sum(), (query, key, value))])
        except RuntimeError:
            return False
    return all(torch.allclose(a.float(), b.float(), atol=0.05, rtol=0.05) for a, b in zip(*results, strict=True))


def attend_dropping(
    query_BHLE: Tensor,
    key_BKLE: Tensor,
    value_BKLE: Tensor,
    mask: Tensor | CuSeqlens | KeysUpTo | None,
    scoring: Scoring,
    rows_BHL: Tensor,
    share: float,
) -> Tensor:
    """Attention with dropout of its weights, in plain torch because no kernel accepts a given dropout mask."""
    assert mask is None or isinstance(mask, Tensor), "attention dropout needs a dense mask"
    if scoring.window is not None:
        near = causal_window_mask(query_BHLE.shape[2], key_BKLE.shape[2], scoring.window, query_BHLE.device)
        mask = near if mask is None else mask & near
    weights = _scores(query_BHLE, key_BKLE, mask, scoring).softmax(dim=-1)
    dropped: Tensor = drop(weights, rows_BHL, share)
    groups = query_BHLE.shape[1] // key_BKLE.shape[1]
    return dropped.to(value_BKLE.dtype) @ value_BKLE.repeat_interleave(groups, dim=1)


def rows_of(sample_ids_B: Tensor, row_positions_BL: Tensor, heads: range, salt: int) -> Tensor:
    """A hash of each sample, head and query, from which attention dropout draws."""
    numbers_H = torch.arange(heads.start, heads.stop, device=sample_ids_B.device)
    rows_BH = mixed(mixed(sample_ids_B * FACTORS[0] + salt)[:, None] + numbers_H * FACTORS[1])
    return mixed(rows_BH[..., None] + row_positions_BL[:, None] * FACTORS[2])


def within_documents(documents_BL: Tensor) -> Tensor:
    """True where a token may attend: itself and earlier tokens of its document. Shape (B, 1, L, L)."""
    length = documents_BL.shape[1]
    earlier_LL = torch.ones(length, length, dtype=torch.bool, device=documents_BL.device).tril()
    same_BLL = documents_BL[:, :, None] == documents_BL[:, None, :]
    return (same_BLL & earlier_LL)[:, None]
