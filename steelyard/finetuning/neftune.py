"""NEFTune: noise on the embeddings in training, uniform in [-1, 1] times strength / sqrt(length x width).

Like all random numbers here, each element is a hash of seed, sample, position and channel, the same on every layout.
"""

from __future__ import annotations

import torch
from torch import Tensor

from steelyard.model import LanguageModel
from steelyard.model.dropout import FACTORS, KEPT_BITS, Dropout, mixed
from steelyard.training.extension import Extension


class NoisyDropout(Dropout):
    """The dropout after the embedding, with noise added before it."""

    def __init__(self, share: float, strength: float, length: int) -> None:
        super().__init__(share)
        self.strength, self.length = strength, length

    def forward(self, x: Tensor, sample_ids_B: Tensor | None, row_positions_BL: Tensor | None) -> Tensor:
        """Add noise, then apply dropout."""
        if self.training and sample_ids_B is not None and row_positions_BL is not None:
            here = x.shape[-2]
            positions_BL = row_positions_BL[:, self.shard[0] * here : self.shard[0] * here + here]
            noise = uniform(x, sample_ids_B, positions_BL, self.salt + 1)
            x = x + self.strength / (self.length * x.shape[-1]) ** 0.5 * noise
        return super().forward(x, sample_ids_B, row_positions_BL)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def uniform(like: Tensor, sample_ids_B: Tensor, row_positions_BL: Tensor, salt: int) -> Tensor:
    """Random numbers in [-1, 1] for samples, positions and the channels of `like`."""
    rows_BL = mixed(mixed(sample_ids_B * FACTORS[0] + salt)[:, None] + row_positions_BL * FACTORS[1])
    columns = torch.arange(like.shape[-1], device=like.device) * FACTORS[2]
    bits = mixed(rows_BL[..., None] + columns) >> (62 - KEPT_BITS) & ((1 << KEPT_BITS) - 1)
    return (bits.to(torch.float32) / (1 << (KEPT_BITS - 1)) - 1).to(like.dtype)


def add_noise(extension: Extension, strength: float, length: int) -> Extension:
    """Make an extension also add noise to the embeddings; `length` is the sequence length."""
    plain = extension.transform

    def transform(model: LanguageModel) -> None:
        plain(model)
        if model.embed is not None:
            noisy = NoisyDropout(model.embed_dropout.share, strength, length)
            noisy.salt = model.embed_dropout.salt
            model.embed_dropout = noisy

    extension.transform, extension.needs_samples = transform, True  # type: ignore[method-assign]
    return extension
