"""Muon: the update of a weight matrix is its orthogonalized momentum. AdamW updates all other parameters.

    m <- beta m + (1 - beta) g        u = NewtonSchulz(g + beta (m - g)), with nesterov; otherwise NewtonSchulz(m)
    p <- p (1 - lr wd) - lr scale(rows, columns) u

Weight matrices are those that the blocks of layers declare: not the embedding, the head, norms, biases, routers,
adapters or mask logits. Experts are orthogonalized one by one. The scale is that of Keller Jordan ("original") or of
Moonlight ("match_rms_adamw"), as in `torch.optim.Muon`, which is the specification on one process.

On several ranks each matrix is orthogonalized once, by one of the ranks that hold the parameters of the stage
(`parallel/matrix_exchange.py`). Momentum is sharded like the parameter, and is all the state of a matrix.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from steelyard.core.recipe.optim_section import OptimSection
from steelyard.core.recipe.optimizers import newton_schulz_flops
from steelyard.model import cpu_bf16
from steelyard.parallel.matrix_exchange import HeldPiece, plan_rounds
from steelyard.parallel.mesh import MeshAxis
from steelyard.training.optimizers import OptimParam, param_groups
from steelyard.training.optimizers.adamw import AdamW, options
from steelyard.training.optimizers.newton_schulz import orthogonalize

MOMENTUM = "momentum"


def build(params: list[OptimParam], optim: OptimSection, stage: MeshAxis) -> Muon:
    """Muon for weight matrices of layers, AdamW for all other parameters."""
    return Muon(params, optim, stage)


class Muon(AdamW):
    """Muon and AdamW in one optimizer, with the state of both."""

    def __init__(self, params: list[OptimParam], optim: OptimSection, stage: MeshAxis) -> None:
        factor = (optim.adamw_learning_rate or optim.learning_rate) / optim.learning_rate
        others = [each._replace(rate=each.rate * factor) for each in params if not each.shard.is_matrix]
        matrices = [each for each in params if each.shard.is_matrix]
        super().__init__(param_groups(others) + param_groups(matrices), **options(optim))
        self.optim = optim
        self.tensors = [each.tensor for each in matrices]
        self.scales = [update_scale(optim, *each.shard.shape[-2:]) for each in matrices]
        self.group_of = {tensor: group for group in self.param_groups for tensor in group["params"]}
        shards = [each.shard for each in matrices]
        self.rounds = plan_rounds(shards, stage, lambda rows, columns: newton_schulz_flops(rows, columns, 1))
        self.dtype = torch.bfloat16 if optim.muon_precision == "bf16" else torch.float32
        if self.dtype == torch.bfloat16 and any(tensor.device.type == "cpu" for tensor in self.tensors):
            cpu_bf16.use_fp32_products()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the matrices, which all ranks of the stage do together, then every other parameter."""
        for each in self.rounds:
            sent = torch.empty(sum(each.send_sizes), dtype=self.dtype, device=self.grad_scale.device)
            at = 0
            for piece in each.held:
                size = piece.stop - piece.start if piece.is_sent else 0
                self._add_gradient(piece, sent[at : at + size] if piece.is_sent else None)
                at += size
            updates = [orthogonalize(stack, self.optim.muon_ns_steps) for stack in each.gather(sent)]
            for piece, update in zip(each.held, each.scatter(updates, like=sent), strict=True):
                self._apply(piece, update)
        for tensor in self.tensors:
            tensor.grad = None
        super().step()

    def make_state(self) -> None:
        """Create the state for a checkpoint to be loaded into, without an exchange."""
        for tensor in self.tensors:
            tensor.grad = None
            if tensor.numel():
                self.state[tensor][MOMENTUM] = torch.zeros_like(tensor)
        super().step()

    def _add_gradient(self, piece: HeldPiece, out: Tensor | None) -> None:
        """Update the momentum of a piece, and write what is orthogonalized to `out`."""
        tensor = self.tensors[piece.param]
        state = self.state[tensor]
        if MOMENTUM not in state:
            state[MOMENTUM] = torch.zeros_like(tensor)
        # All ranks take part in the exchange, so a matrix without a gradient has one of zeros.
        gradient = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
        flat = (_flat(each, piece) for each in (gradient, state[MOMENTUM]))
        beta, nesterov = self.optim.muon_momentum, self.optim.muon_nesterov
        _kernels(tensor).add_gradient(*flat, out, self.grad_scale, self.found_inf, beta, nesterov)

    def _apply(self, piece: HeldPiece, update: Tensor) -> None:
        tensor = self.tensors[piece.param]
        group = self.group_of[tensor]
        rate, kept = group["lr"] * self.scales[piece.param], 1 - group["lr"] * group["weight_decay"]
        _kernels(tensor).apply_update(_flat(tensor, piece), update, self.found_inf, kept, rate)


def update_scale(optim: OptimSection, rows: int, columns: int) -> float:
    """The factor on the orthogonalized update of a matrix."""
    original = optim.muon_scale == "original"
    scale = math.sqrt(max(1, rows / columns)) if original else 0.2 * math.sqrt(max(rows, columns))
    return scale * optim.muon_extra_scale_factor


def _flat(tensor: Tensor, piece: HeldPiece) -> Tensor:
    return tensor.view(-1)[piece.start : piece.stop]


def _kernels(tensor: Tensor) -> Any:
    """The module with the operations per element: kernels on a GPU, otherwise plain torch."""
    if tensor.is_cuda:
        from steelyard.training.optimizers import muon_kernel

        return muon_kernel
    from steelyard.training.optimizers import muon_elementwise

    return muon_elementwise
