"""Gumbel-softmax masks for mask learning, in plain torch.

Each group of weights has logits over its candidate masks. In training a micro-batch draws Gumbel noise g and computes
with the soft mask

    y = softmax((scale * logits + g) / temperature),    m = y @ candidates,    product = weight * m

or, if `hard`, with the candidate of the largest y, with the gradient of the soft mask (straight-through).

Noise has no generator state. It is a hash, in 32-bit integers, of the draw (the micro-batch), the salt (the run and the
parameter) and the element's index in the whole parameter. So every layout draws the same noise, a recomputed layer
draws it again, and the backward pass recomputes it instead of storing it.

The loss has the term -weight_reg * sum ||weight * m||^2. The forward pass does not compute its value; its gradient with
respect to the mask, -2 weight_reg * weight^2 * m, is added to that of the product.

This is the specification of `masked_kernels.py`. Tensor suffixes: O outputs, I inputs, G groups of a row, C candidates,
M members of a group.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

WORD = 1 << 32
FACTORS = (0x85EBCA6B, 0xC2B2AE35)
GROUP_STEP, CANDIDATE_STEP = 0x9E3779B1, 0x85157AF5
UNIFORM_BITS = 23  # plus a half, so that neither 0 nor 1 is ever drawn in fp32


@dataclass(frozen=True)
class GroupOffset:
    """The offset of a rank's shard of a parameter: first row, first group in a row, and groups of a whole row."""

    first_row: int
    first_group: int
    groups: int


def salt_of(seed: int, name: str) -> tuple[int, int]:
    """Two signed 32-bit numbers that identify a parameter in a run."""
    digest = hashlib.sha256(f"{seed}/{name}/gumbel".encode()).digest()
    return _signed(int.from_bytes(digest[:4], "little")), _signed(int.from_bytes(digest[4:8], "little"))


def draw_of(sample_ids_B: Tensor) -> Tensor:
    """Two 32-bit numbers, on the samples' device, that identify a micro-batch by its first sample in the run.

    The step and the micro-batch's index in the global batch determine this sample.
    """
    first = sample_ids_B[:1].long()
    return torch.cat([first, first * FACTORS[1] + (first >> 32)]).to(torch.int32)


def draw_of_step(step: int) -> tuple[int, int]:
    """Two signed 32-bit numbers that identify a step, for experts: see `masked_linear.MaskedExperts`."""
    return _signed(step % WORD), _signed(step * FACTORS[1] % WORD)


def noise(draw_2: Tensor, salt: tuple[int, int], shape: tuple[int, int, int], offset: GroupOffset) -> Tensor:
    """Standard Gumbel noise for a shard of shape (rows, groups of a row, candidates), in fp32.

    All integers have 32 bits and wrap around; shifts fill with zeros.

        k0, k1   = mix(draw0 + salt0), mix(draw1 + salt1)
        group    = row * groups of a whole row + group of the row, both counted in the whole parameter
        word     = mix(mix(group * GROUP_STEP + k0) + k1 + candidate * CANDIDATE_STEP)
        uniform  = (word >> 9) + 0.5, divided by 2^23
        noise    = -log(-log(uniform))
    """
    rows, groups, candidates = shape
    device = draw_2.device
    row_O1 = torch.arange(offset.first_row, offset.first_row + rows, dtype=torch.int32, device=device)[:, None]
    group_1G = torch.arange(offset.first_group, offset.first_group + groups, dtype=torch.int32, device=device)[None]
    candidate_C = torch.arange(candidates, dtype=torch.int32, device=device) * _signed(CANDIDATE_STEP)
    key_2 = mixed(draw_2 + torch.tensor(salt, dtype=torch.int32, device=device))
    group_OG = (row_O1 * offset.groups + group_1G) * _signed(GROUP_STEP) + key_2[0]
    word_OGC = mixed((mixed(group_OG) + key_2[1])[..., None] + candidate_C)
    uniform_OGC = (_shifted(word_OGC, 32 - UNIFORM_BITS).float() + 0.5) * 2.0**-UNIFORM_BITS
    return -torch.log(-torch.log(uniform_OGC))


def mixed(value: Tensor) -> Tensor:
    """Mix the bits of an int32: every bit affects all bits; reversible."""
    value = (value ^ _shifted(value, 16)) * _signed(FACTORS[0])
    value = (value ^ _shifted(value, 13)) * _signed(FACTORS[1])
    return value ^ _shifted(value, 16)


def soft_choice(logits_OGC: Tensor, noise_OGC: Tensor, scale: Tensor | float, temperature: Tensor | float) -> Tensor:
    """The probabilities y of the candidates under this noise."""
    scaled_OGC = (logits_OGC.float() * scale + noise_OGC) / temperature
    # A softmax over six adjacent values is slow on a CPU; over six long rows it takes a third, copies included.
    return torch.softmax(scaled_OGC.movedim(-1, 0).contiguous(), dim=0).movedim(0, -1)


def mask_of(choice_OGC: Tensor, candidates_CM: Tensor, hard: bool) -> Tensor:
    """The mask (O, I) of a soft choice: the mean of the candidates, or the most probable one (the first of ties)."""
    if hard:
        return candidates_CM[choice_OGC.argmax(dim=-1)].flatten(-2)
    return (choice_OGC @ candidates_CM).flatten(-2)


def argmax_mask(logits_OGC: Tensor, candidates_CM: Tensor) -> Tensor:
    """The mask (O, I) of the largest logits, without noise, as bool; of experts (X, O, I)."""
    return candidates_CM.bool()[logits_OGC.argmax(dim=-1)].flatten(-2)


def prior_shift(mask_OI: Tensor, candidates_CM: Tensor, std: float, strength: float) -> Tensor:
    """The shift of the logits by a prior mask M0: (<M0, Mi> - 1) * std * strength for candidate Mi."""
    members_OGM = mask_OI.unflatten(-1, (-1, candidates_CM.shape[1])).float()
    shift_OGC: Tensor = (members_OGM @ candidates_CM.float().t() - 1) * (std * strength)
    return shift_OGC


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
    """weight * mask in the weight's dtype; only the logits get a gradient.

    `anneal_3` holds scale, temperature and weight_reg of the step, in fp32 on the device: the host changes them each
    step without recompilation and without synchronisation. weight_reg includes the factor that scales the loss.
    """
    product: Tensor = _MaskedWeight.apply(  # type: ignore[no-untyped-call]
        weight_OI, logits_OGC, candidates_CM, draw_2, anneal_3, salt, offset, hard
    )
    return product


def logits_gradient(
    grad_OI: Tensor, weight_OI: Tensor, mask_OI: Tensor, choice_OGC: Tensor, candidates_CM: Tensor, anneal_3: Tensor
) -> Tensor:
    """(scale / temperature) * y * (c - <y, c>), with c the mask's gradient times each candidate."""
    scale, temperature, weight_reg = anneal_3.unbind()
    weight_OI = weight_OI.float()
    by_mask_OI = grad_OI.float() * weight_OI - 2 * weight_reg * weight_OI.square() * mask_OI
    by_choice_OGC = by_mask_OI.unflatten(1, (-1, candidates_CM.shape[1])) @ candidates_CM.t()
    mean_OG1 = (choice_OGC * by_choice_OGC).sum(dim=-1, keepdim=True)
    gradient_OGC: Tensor = (scale / temperature) * choice_OGC * (by_choice_OGC - mean_OG1)
    return gradient_OGC


class _MaskedWeight(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        weight_OI: Tensor,
        logits_OGC: Tensor,
        candidates_CM: Tensor,
        draw_2: Tensor,
        anneal_3: Tensor,
        salt: tuple[int, int],
        offset: GroupOffset,
        hard: bool,
    ) -> Tensor:
        ctx.save_for_backward(weight_OI, logits_OGC, candidates_CM, draw_2, anneal_3)
        ctx.salt, ctx.offset, ctx.hard = salt, offset, hard
        _, mask_OI = _drawn(logits_OGC, candidates_CM, draw_2, anneal_3, salt, offset, hard)
        return (weight_OI.float() * mask_OI).to(weight_OI.dtype)

    @staticmethod
    def backward(ctx: Any, grad_OI: Tensor) -> tuple[Tensor | None, ...]:
        weight_OI, logits_OGC, candidates_CM, draw_2, anneal_3 = ctx.saved_tensors
        choice_OGC, mask_OI = _drawn(logits_OGC, candidates_CM, draw_2, anneal_3, ctx.salt, ctx.offset, ctx.hard)
        grad_OGC = logits_gradient(grad_OI, weight_OI, mask_OI, choice_OGC, candidates_CM, anneal_3)
        return None, grad_OGC.to(logits_OGC.dtype).contiguous(), None, None, None, None, None, None


def _drawn(
    logits_OGC: Tensor,
    candidates_CM: Tensor,
    draw_2: Tensor,
    anneal_3: Tensor,
    salt: tuple[int, int],
    offset: GroupOffset,
    hard: bool,
) -> tuple[Tensor, Tensor]:
    rows, groups, candidates = logits_OGC.shape
    noise_OGC = noise(draw_2, salt, (rows, groups, candidates), offset)
    choice_OGC = soft_choice(logits_OGC, noise_OGC, anneal_3[0], anneal_3[1])
    return choice_OGC, mask_of(choice_OGC, candidates_CM, hard)


def _shifted(value: Tensor, bits: int) -> Tensor:
    """Logical right shift of an int32."""
    return (value >> bits) & (WORD - 1 >> bits)


def _signed(value: int) -> int:
    """An unsigned 32-bit number as int32."""
    return value - WORD if value >= WORD // 2 else value
