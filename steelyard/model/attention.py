"""Causal attention between queries and keys, and who may attend to whom when a row holds several documents.

Tensor suffixes: B batch, L length, H heads, K key-value heads, E head width.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right

from steelyard.model.dropout import FACTORS, kept, mixed


def attend(query_BHLE: Tensor, key_BKLE: Tensor, value_BKLE: Tensor, mask: Tensor | None) -> Tensor:
    """Mix the values by attention; without a mask a token sees itself and everything before it.

    Where there are more keys than queries, the queries are the last tokens.
    """
    grouped = query_BHLE.shape[1] != key_BKLE.shape[1]
    length, seen = query_BHLE.shape[2], key_BKLE.shape[2]
    if mask is None and 1 < length < seen:
        mask = causal_lower_right(length, seen)
    is_causal = mask is None and length == seen
    return F.scaled_dot_product_attention(
        query_BHLE, key_BKLE, value_BKLE, attn_mask=mask, is_causal=is_causal, enable_gqa=grouped
    )


def attend_dropping(
    query_BHLE: Tensor,
    key_BKLE: Tensor,
    value_BKLE: Tensor,
    mask: Tensor | None,
    rows_BHL: Tensor,
    share: float,
) -> Tensor:
    """The same with a share of the weights dropped, spelled out because no kernel takes our choice of them."""
    groups = query_BHLE.shape[1] // key_BKLE.shape[1]
    key_BHLE, value_BHLE = (x.repeat_interleave(groups, dim=1) for x in (key_BKLE, value_BKLE))
    length = query_BHLE.shape[2]
    if mask is None:
        mask = torch.ones(length, length, dtype=torch.bool, device=query_BHLE.device).tril()
    scores = (query_BHLE @ key_BHLE.transpose(-1, -2)).float() / query_BHLE.shape[-1] ** 0.5
    weights = scores.masked_fill(~mask, float("-inf")).softmax(dim=-1)
    kept_weights: Tensor = kept(weights, rows_BHL, share)
    return kept_weights.to(value_BHLE.dtype) @ value_BHLE


def rows_of(samples_B: Tensor, places_BL: Tensor, heads: range, salt: int) -> Tensor:
    """A hash for each sample, head and query: what attention dropout draws from."""
    numbers_H = torch.arange(heads.start, heads.stop, device=samples_B.device)
    rows_BH = mixed(mixed(samples_B * FACTORS[0] + salt)[:, None] + numbers_H * FACTORS[1])
    return mixed(rows_BH[..., None] + places_BL[:, None] * FACTORS[2])


def within_documents(documents_BL: Tensor) -> Tensor:
    """True where a token may look: at itself and at what came before it in its own document. Shape (B, 1, L, L)."""
    length = documents_BL.shape[1]
    earlier_LL = torch.ones(length, length, dtype=torch.bool, device=documents_BL.device).tril()
    same_BLL = documents_BL[:, :, None] == documents_BL[:, None, :]
    return (same_BLL & earlier_LL)[:, None]
