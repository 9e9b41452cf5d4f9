"""Who may attend to whom when a row holds several documents."""

from __future__ import annotations

import torch
from torch import Tensor


def within_documents(documents_BL: Tensor) -> Tensor:
    """True where a token may look: at itself and at what came before it in its own document. Shape (B, 1, L, L)."""
    length = documents_BL.shape[1]
    earlier_LL = torch.ones(length, length, dtype=torch.bool, device=documents_BL.device).tril()
    same_BLL = documents_BL[:, :, None] == documents_BL[:, None, :]
    return (same_BLL & earlier_LL)[:, None]
