"""A mixture of experts: a router, the experts' products grouped by expert, and the statistics of the routing.

No token is dropped unless the block has a capacity. Tokens are sorted by expert, so that one grouped product computes
all experts, whatever their loads. Sorting and its inverse are gathers in both directions: no atomic additions, so a
step is deterministic. The router computes in fp32.

Tensor suffixes: B batch, L length, D hidden, F width of an expert, X experts, T tokens, K experts per token, S slots
(a token with one of its experts, T x K of them).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from steelyard.core.recipe.blocks import ExpertsBlock, Routing
from steelyard.model.mlp import Mlp, gated

TOKENS, DROPPED, ENTROPY, AUX = range(-4, 0)
"""Where `RouterOutput.stats` has the tokens, the dropped slots, the summed entropy and the summed losses."""

TINY = 1e-20  # Sigmoids can all be zero.


class RouterOutput(NamedTuple):
    """What a layer with experts returns beside its output."""

    loss: Tensor
    """The weighted losses of the router, summed over tokens."""
    stats: Tensor
    """Slots of each expert, then tokens, dropped slots, entropy and losses, summed over tokens; without gradient."""


class Choice(NamedTuple):
    """The experts of each token and their weights."""

    experts_TK: Tensor
    weights_TK: Tensor
    logits_TX: Tensor
    shares_TX: Tensor
    """Scores that sum to 1."""


class Router(nn.Module):
    """Chooses the experts of each token."""

    balance: nn.Parameter | None

    def __init__(self, block: ExpertsBlock) -> None:
        super().__init__()
        self.routing = block.routing
        self.weight = nn.Parameter(torch.empty(self.routing.experts, block.hidden))
        has_bias = self.routing.bias_rate is not None
        balance = nn.Parameter(torch.empty(self.routing.experts), requires_grad=False) if has_bias else None
        self.register_parameter("balance", balance)

    def forward(self, x_TD: Tensor) -> Choice:
        routing = self.routing
        logits_TX = F.linear(x_TD.float(), self.weight.float())
        scores_TX = logits_TX.softmax(-1) if routing.score == "softmax" else logits_TX.sigmoid()
        by_TX = scores_TX if self.balance is None else scores_TX + self.balance.float()
        experts_TK = by_TX.topk(routing.top_k, dim=-1).indices
        weights_TK = scores_TX.gather(1, experts_TK)
        if routing.normalizes:
            weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + TINY)
        shares_TX = scores_TX if routing.score == "softmax" else scores_TX / (scores_TX.sum(-1, keepdim=True) + TINY)
        return Choice(experts_TK, weights_TK * routing.scale, logits_TX, shares_TX)


class Slots(NamedTuple):
    """The slots sorted by expert. Dropped slots are last and belong to no expert."""

    order_S: Tensor
    inverse_S: Tensor
    counts_X: Tensor


def sorted_slots(experts_TK: Tensor, experts: int) -> Slots:
    """Sort slots by expert; the number `experts` marks a dropped slot."""
    expert_S = experts_TK.flatten()
    order_S = expert_S.argsort(stable=True)
    inverse_S = torch.empty_like(order_S).scatter_(0, order_S, torch.arange(len(order_S), device=order_S.device))
    counts = torch.zeros(experts + 1, dtype=torch.int64, device=expert_S.device)
    counts = counts.scatter_add_(0, expert_S, torch.ones_like(expert_S))
    return Slots(order_S, inverse_S, counts[:experts])


def grouped_linear(x_SD: Tensor, weight_XFD: Tensor, counts_X: Tensor) -> Tensor:
    """The product of each slot with the matrix of its expert. Slots are sorted; rows after the counts are arbitrary.

    On a GPU the counts are read on the device.
    """
    weight_XFD = weight_XFD.to(x_SD.dtype)
    if x_SD.is_cuda and len(x_SD):
        is_aligned = weight_XFD.shape[1] % 8 == 0 and weight_XFD.shape[2] % 8 == 0  # rows of 16 bytes
        if x_SD.dtype == torch.bfloat16 and is_aligned:
            return grouped_mm(x_SD, weight_XFD, counts_X)
        from steelyard.model import grouped_kernels

        y_SF: Tensor = grouped_kernels.product(x_SD, weight_XFD, counts_X)
        return y_SF
    counts = counts_X.tolist()
    parts = x_SD.split([*counts, len(x_SD) - sum(counts)])
    products = [part @ weight_FD.t() for part, weight_FD in zip(parts, weight_XFD, strict=False)]
    return torch.cat([*products, parts[-1].new_zeros(len(parts[-1]), weight_XFD.shape[1])])


def grouped_mm(x_SD: Tensor, weight_XFD: Tensor, counts_X: Tensor) -> Tensor:
    """The same product by PyTorch's kernel, which reads the counts on the device.

    The kernel writes no rows after the last group, neither of the product nor of its gradient.
    """
    ends_X = counts_X.cumsum(0).to(torch.int32)
    return F.grouped_mm(x_SD, weight_XFD.transpose(-2, -1), offs=ends_X)


class ExpertLinear(nn.Module):
    """The same projection of all experts, as one parameter. Replace `product` to use another arithmetic."""

    product: Callable[[Tensor, Tensor, Tensor], Tensor] = staticmethod(grouped_linear)
    shard: tuple[int, int, int] = (1, 0, 1)
    """The shard of tensor parallelism: its dimension, its index, and the number of shards."""
    expert_shard: tuple[int, int] = (0, 1)
    """The shard of expert parallelism: its index, and the number of shards."""

    def __init__(self, experts: int, rows: int, columns: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, rows, columns))

    def forward(self, x_SD: Tensor, counts_X: Tensor) -> Tensor:
        return self.product(x_SD, self.weight, counts_X)


MATRIX_MODULES = (nn.Linear, nn.Embedding, ExpertLinear)
"""Modules whose frozen weights are stored in the compute dtype. Norms and routers compute in fp32."""


class ExpertStack(nn.Module):
    """The experts of a layer: gated MLPs that compute the slots sorted by expert."""

    gate: ExpertLinear
    up: ExpertLinear
    down: ExpertLinear

    def __init__(self, block: ExpertsBlock) -> None:
        super().__init__()
        self.activation = block.activation
        for name, (rows, columns) in block.expert.matrices().items():
            self.add_module(name, ExpertLinear(block.routing.experts, rows, columns))

    def forward(self, x_SD: Tensor, counts_X: Tensor) -> Tensor:
        inner_SF = gated(self.gate(x_SD, counts_X), self.up(x_SD, counts_X), self.activation)
        output: Tensor = self.down(inner_SF, counts_X)
        return output


class Experts(nn.Module):
    """The router, its experts and the shared expert, in place of an MLP."""

    exchange: Callable[[nn.Module, Tensor, Tensor], Tensor] | None = None
    """Computes the slots on the ranks that hold their experts; set by `parallel/expert_parallel.py`."""
    sum_of_sequence: Callable[[Tensor], Tensor] = staticmethod(lambda counts: counts)
    """Sums counts over the ranks that hold parts of a sequence; set by `parallel/context_parallel.py`."""
    stats: Tensor
    loss_scale: Tensor

    def __init__(self, block: ExpertsBlock) -> None:
        super().__init__()
        self.block = block
        self.router, self.experts = Router(block), ExpertStack(block)
        self.shared = None if block.shared is None else Mlp(block.shared)
        # Filled by the engine at each step, and accumulated over its micro-batches.
        self.register_buffer("stats", torch.zeros(block.routing.experts - TOKENS), persistent=False)
        self.register_buffer("loss_scale", torch.zeros(()), persistent=False)

    def forward(self, x_BLD: Tensor) -> tuple[Tensor, RouterOutput]:
        x_TD, routing = x_BLD.flatten(0, 1), self.block.routing
        choice = self.router(x_TD)
        experts_TK = choice.experts_TK
        counts_BX = _counts_by_row(experts_TK.view(len(x_BLD), -1), routing.experts)
        drops = routing.capacity is not None and self.training
        if drops:
            assert routing.capacity is not None
            limit = -(-routing.capacity * x_BLD.shape[1] * routing.top_k // routing.experts)
            experts_TK = _within_capacity(experts_TK, len(x_BLD), routing.experts, int(limit))
        slots = sorted_slots(experts_TK, routing.experts)
        x_SD = gathered(x_TD, slots, routing.top_k)
        is_kept_S1 = (torch.arange(len(x_SD), device=x_SD.device) < slots.counts_X.sum())[:, None] if drops else None
        if is_kept_S1 is not None:  # The gradient of dropped slots is arbitrary; this sets it to zero.
            x_SD = x_SD.where(is_kept_S1, 0)
        y_SD = (
            self.experts(x_SD, slots.counts_X)
            if self.exchange is None
            else self.exchange(self.experts, x_SD, slots.counts_X)
        )
        if is_kept_S1 is not None:
            y_SD = y_SD.where(is_kept_S1, 0)
        y_TKD = permuted(y_SD, slots).view(*experts_TK.shape, -1)
        output_TD = (y_TKD.float() * choice.weights_TK[..., None]).sum(1).to(x_TD.dtype)
        if self.shared is not None:
            output_TD = output_TD + self.shared(x_TD)
        dropped = experts_TK.numel() - slots.counts_X.sum()
        return output_TD.view_as(x_BLD), self._statistics(choice, counts_BX, dropped, x_BLD.shape[1])

    def _statistics(self, choice: Choice, counts_BX: Tensor, dropped: Tensor, length: int) -> RouterOutput:
        """Losses and counts. The load of an expert is its share of the slots of a sequence."""
        routing = self.block.routing
        whole_BX = self.sum_of_sequence(counts_BX).float()
        load_BX = whole_BX / whole_BX.sum(-1, keepdim=True) * routing.experts
        shares_BX = choice.shares_TX.unflatten(0, (-1, length)).sum(1)
        log_sum_T = choice.logits_TX.logsumexp(-1)
        loss = routing.aux_loss * (load_BX * shares_BX).sum() + routing.z_loss * log_sum_T.square().sum()
        with torch.no_grad():
            entropy = -torch.xlogy(choice.shares_TX, choice.shares_TX).sum()
            tokens = torch.full_like(entropy, len(log_sum_T))
            stats = torch.cat([counts_BX.sum(0).float(), torch.stack([tokens, dropped.float(), entropy, loss])])
        return RouterOutput(loss, stats)


def _counts_by_row(experts_BS: Tensor, experts: int) -> Tensor:
    """The slots of each expert in each row."""
    counts = torch.zeros(len(experts_BS), experts, dtype=torch.int64, device=experts_BS.device)
    return counts.scatter_add_(1, experts_BS, torch.ones_like(experts_BS))


def _within_capacity(experts_TK: Tensor, rows: int, experts: int, limit: int) -> Tensor:
    """Drop the slots of an expert after its first `limit` in a row, in the order of the sequence."""
    expert_BS = experts_TK.view(rows, -1)
    place_BS = F.one_hot(expert_BS, experts).cumsum(1).gather(2, expert_BS[..., None])[..., 0]
    return expert_BS.where(place_BS <= limit, experts).view_as(experts_TK)


def gathered(x_TD: Tensor, slots: Slots, top_k: int) -> Tensor:
    """The token of each sorted slot. The gradient of a token is the sum over its slots, by a gather."""
    rows: Tensor = _Gather.apply(x_TD, slots.order_S, slots.inverse_S, top_k)  # type: ignore[no-untyped-call]
    return rows


def permuted(y_SD: Tensor, slots: Slots) -> Tensor:
    """The sorted slots in the order of the tokens."""
    rows: Tensor = _Permute.apply(y_SD, slots.inverse_S, slots.order_S)  # type: ignore[no-untyped-call]
    return rows


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, order_S: Tensor, inverse_S: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(inverse_S)
        ctx.top_k = top_k
        return x_TD.index_select(0, order_S // top_k)

    @staticmethod
    def backward(ctx: Any, grad_SD: Tensor) -> tuple[Tensor, None, None, None]:
        (inverse_S,) = ctx.saved_tensors
        grad_TKD = grad_SD.index_select(0, inverse_S).unflatten(0, (-1, ctx.top_k))
        return grad_TKD.sum(1), None, None, None


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_SD: Tensor, order_S: Tensor, inverse_S: Tensor) -> Tensor:
        ctx.save_for_backward(inverse_S)
        return x_SD.index_select(0, order_S)

    @staticmethod
    def backward(ctx: Any, grad_SD: Tensor) -> tuple[Tensor, None, None]:
        return grad_SD.index_select(0, ctx.saved_tensors[0]), None, None


def with_router_loss(x: Tensor, loss: Tensor, scale: Tensor) -> Tensor:
    """Return x; in the backward pass `scale` is the gradient of the loss, on any pipeline stage."""
    result: Tensor = _WithLoss.apply(x, loss, scale)  # type: ignore[no-untyped-call]
    return result


class _WithLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(scale)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        return grad, ctx.saved_tensors[0], None


__all__ = ["ExpertLinear", "ExpertStack", "Experts", "Router", "RouterOutput", "Routing", "with_router_loss"]
